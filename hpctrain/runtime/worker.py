"""The process that Slurm starts for each rank: `python -P -m hpctrain.runtime.worker '[SCRIPT, ARG, ...]'`.

It finds out its rank, sends its output to the rank's log, and runs the user's script as `__main__`, with
the variables that `env://` and torchrun scripts expect. It knows nothing of training, and imports no torch.

The script and its arguments come as one word, in JSON: to srun a word such as a lone `:` has a meaning.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster import ENVIRONMENT_VARIABLE, detect
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.rundir import ATTEMPT_VARIABLE, LIFELINE_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.failure import write_failure
from hpctrain.runtime.log_times import note_log_times
from hpctrain.runtime.signals import leave_on_stop


def main(argv: list[str]) -> NoReturn:
    """Run the script that `argv[0]` names, with its arguments, as this process's rank."""
    leave_on_stop()
    _die_with_supervisor()
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    # Srun and the local launcher speak Slurm's language; what an outer torchrun or the user's shell left
    # behind must not tell a rank that it is alone.
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    ranks = detect({**os.environ, ENVIRONMENT_VARIABLE: "slurm"})
    os.environ.update(ranks.torch_variables())
    log = run.rank_log(attempt, ranks.rank)
    _redirect_output(log)
    note_log_times(run.log_times(attempt, ranks.node_rank), ranks.rank)
    faulthandler.enable()
    script, *args = json.loads(argv[0])
    sys.argv = [script, *args]
    # As `python SCRIPT` does; this interpreter was started with -P, so no other folder stands first.
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
        if code not in (0, EXIT_CONTINUE):
            error = RuntimeError(f"the script called sys.exit({leaving.code!r})")
            write_failure(run.failure(attempt, ranks.rank), error, log, os.environ)
        if code != 0:
            _exit_now(code)
    except BaseException as error:  # noqa: BLE001 (a rank ends here, and says of what)
        traceback.print_exception(error)
        write_failure(run.failure(attempt, ranks.rank), error, log, os.environ)
        _exit_now(1)
    sys.exit(0)


def _redirect_output(log: Path) -> None:
    """Send stdout and stderr, of native code too, to the end of `log`, line by line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _die_with_supervisor() -> None:
    """Where a lifeline was handed down, kill this rank and its children as soon as the other end is gone."""
    text = os.environ.pop(LIFELINE_VARIABLE, None)
    if text is None:
        return
    fd = int(text)
    os.set_inheritable(fd, False)

    def watch() -> None:
        os.read(fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="hpctrain-lifeline", daemon=True).start()


def _exit_code(code: object) -> int:
    """The exit code that `sys.exit(code)` stands for; a text is printed, as Python does."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _exit_now(code: int) -> NoReturn:
    """Leave without the interpreter's clean-up, which may wait for peers that will not answer any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
