"""Run a program beside a rank on this host, with its environment and working directory.

`python -P -m hpctrain.runtime.program.attach RUN_DIR ATTEMPT RANK COMMAND…`
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster import ENVIRONMENT_VARIABLE, detect
from hpctrain.cluster.processes import ProcessInfo, die_with_parent, processes
from hpctrain.cluster.signal_processes import find_rank
from hpctrain.errors import RunFailed
from hpctrain.files import is_locked
from hpctrain.rundir import RunDir

#: Prefixes of variables that connect a process to the run, which a program beside the rank must not join.
_OF_THE_RUN = ("HPCTRAIN_", "MASTER_", "TORCHELASTIC_", "PMI_", "PMIX_")
#: Variables of the user's terminal.
_TERMINAL = ("TERM", "COLORTERM", "LANG", "LC_ALL", "DISPLAY")
_POLL_S = 0.5
#: Time for a shell to save its history and to end its programs.
_HANGUP_S = 2.0
#: prctl(2): orphaned descendants become children of this process.
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> NoReturn:
    run_dir, attempt, rank, *command = argv
    process = require_rank(run_dir, attempt, rank)
    # In a job, Slurm ends this process.
    lock = None if "SLURM_JOB_ID" in os.environ else RunDir(Path(run_dir)).lock
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        folder, environ = os.readlink(f"/proc/{process.pid}/cwd"), environment_beside(process, os.environ)
        # In a container, the path may be that of the host. The container starts in the right folder.
        cwd = folder if os.path.isdir(folder) else None
        child = subprocess.Popen(command, env=environ, cwd=cwd, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"Error: cannot run {command[0]!r}: {error.strerror}: {error.filename!r}.", file=sys.stderr)
        sys.exit(127)
    try:
        code = _wait(child, lock)
    finally:
        child.kill()
        while left := [process for process in processes(os.geteuid()) if process.parent == os.getpid()]:
            for process in left:
                process.kill()
                os.waitpid(process.pid, 0)
    sys.exit(128 - code if code < 0 else code)


def require_rank(run_dir: str, attempt: str, rank: str) -> ProcessInfo:
    if (process := find_rank(run_dir, int(attempt), int(rank))) is None:
        print(
            f"Error: Rank {rank} of attempt {attempt} has no process on {os.uname().nodename}. The rank "
            "may be starting, or may have exited. Use `hpctrain status` to see the newest attempt.",
            file=sys.stderr,
        )
        sys.exit(RunFailed.exit_code)
    return process


def environment_beside(process: ProcessInfo, terminal: Mapping[str, str]) -> dict[str, str]:
    source = "torchrun" if "TORCHELASTIC_RUN_ID" in process.environ else "slurm"
    ranks = detect({**process.environ, ENVIRONMENT_VARIABLE: source})
    environ = {**process.environ, **ranks.torch_variables()}
    outside = {name: value for name, value in environ.items() if not name.startswith(_OF_THE_RUN)}
    return outside | {name: terminal[name] for name in _TERMINAL if name in terminal}


def _wait(child: subprocess.Popen[bytes], lock: Path | None) -> int:
    """Wait for a program, pass signals to it, and end it when the supervisor no longer holds the lock."""
    # The terminal sends these signals to both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    while lock is None or is_locked(lock):
        with suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL_S)
    print("hpctrain: the run has ended.", file=sys.stderr)
    child.send_signal(signal.SIGHUP)
    with suppress(subprocess.TimeoutExpired):
        return child.wait(_HANGUP_S)
    child.kill()
    return child.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
