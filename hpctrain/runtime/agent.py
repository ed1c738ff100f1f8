"""What Slurm starts on each node where torchrun starts the ranks: `python -P -m hpctrain.runtime.agent PLAN`.

An agent of torchrun under the supervisor's eye. It meets the other agents at the store of the supervisor, or
at an etcd server; it leaves stop signals to the ranks, which have them from Slurm; and it ends with exit code
75 where its ranks left to be continued. What goes wrong on a node ends the attempt: it is the supervisor that
starts anew, with fresh agents and a fresh store, and so torchrun's own restarts are switched off.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hpctrain.cluster.addresses import address_towards
from hpctrain.cluster.hosts import host_name
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.files import write_atomic
from hpctrain.last_words import last_words
from hpctrain.rundir import ATTEMPT_VARIABLE, LIFELINE_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.lifeline import die_with_supervisor
from hpctrain.runtime.stop_notes import STOP_SIGNALS

#: Agents come up as slowly as ranks: they import torch from a cold shared file system.
_JOIN_TIMEOUT_S = 300
#: After one rank has ended, the others have this long; the supervisor may be less patient.
_FOLLOW_S = 30


def main(argv: list[str]) -> NoReturn:
    """Start the ranks of this node as the plan `argv[0]`, in JSON, says."""
    plan = json.loads(argv[0])
    # Only the local launcher hands a lifeline down; its signals reach the group of the agent alone.
    _Stop(pass_on=LIFELINE_VARIABLE in os.environ).listen()
    die_with_supervisor(os.environ)
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    log = run.agent_log(attempt, int(os.environ["SLURM_NODEID"]))
    _send_output_to(log)
    # Torchrun tells the ranks itself where they meet.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(torchrun_options(plan, os.environ))
    except ChildFailedError as error:
        if all(_is_stop(failure.exitcode) for failure in error.failures.values()):
            _leave(EXIT_CONTINUE)
        for rank, failure in error.failures.items():
            if not run.failure(attempt, rank).exists() and not _is_stop(failure.exitcode):
                _write_failure(run, attempt, rank, failure.exitcode, log)
        _leave(1)
    _leave(0)


def torchrun_options(plan: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """The command line of this node's torchrun."""
    host = environ["MASTER_ADDR"]
    endpoint = plan["endpoint"] or f"{host}:{environ['MASTER_PORT']}"
    conf = f"join_timeout={_JOIN_TIMEOUT_S}"
    if plan["backend"] == "c10d":
        conf += ",is_host=false"
    return [
        f"--nnodes={plan['nodes']}",
        f"--nproc-per-node={plan['ranks_per_node']}",
        f"--rdzv-backend={plan['backend']}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id=hpctrain-{environ['SLURM_JOB_ID']}-{environ[ATTEMPT_VARIABLE]}",
        f"--rdzv-conf={conf}",
        f"--local-addr={address_towards(host)}",
        "--max-restarts=0",
        # Not SIGTERM: at that, torchrun would end the ranks before they have saved.
        "--signals-to-handle=SIGINT",
        f"--shutdown-timeout={_FOLLOW_S}",
        "--no-python",
        *plan["worker"],
    ]


class _Stop:
    """What the agent does about a stop signal: nothing, for it is the ranks that have to save."""

    def __init__(self, *, pass_on: bool) -> None:
        self._pass_on = pass_on

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        ranks = list(_children())
        if not ranks:
            # Nothing was started yet, so there is nothing to save.
            os._exit(EXIT_CONTINUE)
        if self._pass_on:
            for pid in ranks:
                # Torchrun gives each rank a session of its own.
                os.killpg(pid, number)


def _children() -> Iterable[int]:
    for thread in Path("/proc/self/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def _is_stop(exit_code: int) -> bool:
    return exit_code == EXIT_CONTINUE or -exit_code in STOP_SIGNALS


def _write_failure(run: RunDir, attempt: int, rank: int, exit_code: int, log: Path) -> None:
    """Describe a rank that ended without a word, but perhaps with some in the agent's `log`."""
    number = signal.Signals(-exit_code) if exit_code < 0 else None
    words = last_words(run.rank_log(attempt, rank), log, number=number)
    record = {
        "time": time.time(),
        "order": None,
        "rank": rank,
        "host": host_name(os.environ),
        "kind": "signal" if number else "exit",
        "error": number.name if number else f"exit code {exit_code}",
        "message": words.message,
        "traceback": words.traceback,
        "log": str(words.log),
    }
    run.failures.mkdir(exist_ok=True)
    write_atomic(run.failure(attempt, rank), json.dumps(record, indent=1) + "\n")


def _send_output_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
