"""Start the ranks of this node with torchrun: `python -P -m hpctrain.runtime.torchrun_agent PLAN`.

The agents rendezvous at the supervisor's store or at an etcd server. An agent ignores stop signals, which the
ranks receive from Slurm, and exits with code 75 if its ranks stopped for a continuation. The next attempt has
new agents and a new store, so torchrun's restarts are disabled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hpctrain.authentication import read_secret
from hpctrain.cluster.addresses import address_towards, host_name
from hpctrain.cluster.processes import child_pids, die_with_supervisor
from hpctrain.errors import EXIT_CONTINUE, Unauthenticated
from hpctrain.files import make_folder, own_file, write_atomic
from hpctrain.records.crash_output import find_crash_output
from hpctrain.rundir import ATTEMPT_VARIABLE, LIFELINE_VARIABLE, RunDir, attempt_of
from hpctrain.runtime.failure_file import failure_record, write_failure
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.text import signal_name

#: Agents start as slowly as ranks, because they may import torch from a cold shared file system.
_JOIN_TIMEOUT_S = 300
#: Time limit for the other ranks after the exit of a rank; the limit of the supervisor may be shorter.
_FOLLOW_S = 30


def main(argv: list[str]) -> NoReturn:
    plan = json.loads(argv[0])
    # Only the local launcher passes a lifeline, which is read below. Its signals reach only the agent.
    handler = partial(_handle_stop, is_local=LIFELINE_VARIABLE in os.environ)
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    # Requests stacks of the ranks, and would end this process.
    signal.signal(signal.SIGQUIT, lambda *_: None)
    die_with_supervisor(os.environ)
    run, attempt = attempt_of(os.environ)
    log = run.agent_log(attempt, int(os.environ["SLURM_NODEID"]))
    fd = own_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from hpctrain.runtime.program.signed_rendezvous import register

    try:
        torchrun(torchrun_options(plan, os.environ, register(plan["backend"], read_secret(os.environ))))
    except Unauthenticated as error:
        rank = int(os.environ["SLURM_NODEID"]) * int(plan["ranks_per_node"])
        environ = {**os.environ, "RANK": str(rank)}
        write_failure(run.failure(attempt, rank), failure_record(error, environ), log, environ)
        _exit(1)
    except ChildFailedError as error:
        if all(_is_stop(failure.exitcode) for failure in error.failures.values()):
            _exit(EXIT_CONTINUE)
        for rank, failure in error.failures.items():
            if not run.failure(attempt, rank).exists() and not _is_stop(failure.exitcode):
                _write_failure(run, attempt, rank, failure.exitcode, log)
        _exit(1)
    _exit(0)


def torchrun_options(plan: Mapping[str, Any], environ: Mapping[str, str], backend: str) -> list[str]:
    host = environ["MASTER_ADDR"]
    endpoint = plan["endpoint"] or f"{host}:{environ['MASTER_PORT']}"
    role = ",is_host=false" if plan["backend"] == "c10d" else ""
    return [
        f"--nnodes={plan['nodes']}",
        f"--nproc-per-node={plan['ranks_per_node']}",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id=hpctrain-{environ['SLURM_JOB_ID']}-{environ[ATTEMPT_VARIABLE]}",
        f"--rdzv-conf=join_timeout={_JOIN_TIMEOUT_S}{role}",
        f"--local-addr={address_towards(host)}",
        "--max-restarts=0",
        # Not SIGTERM, on which torchrun would end the ranks before they have saved.
        "--signals-to-handle=SIGINT",
        f"--shutdown-timeout={_FOLLOW_S}",
        "--no-python",
        *plan["worker"],
    ]


def _handle_stop(number: int, _frame: FrameType | None, *, is_local: bool) -> None:
    """Keep this process alive while the ranks save, and pass the signal on if they have not received it."""
    ranks = child_pids(os.getpid())
    if not ranks:
        # No rank has started yet, so there is nothing to save.
        os._exit(EXIT_CONTINUE)
    if is_local:
        for pid in ranks:
            # torchrun starts each rank in a separate session.
            with suppress(ProcessLookupError):
                os.killpg(pid, number)


def _is_stop(exit_code: int) -> bool:
    return exit_code == EXIT_CONTINUE or -exit_code in STOP_SIGNALS


def _write_failure(run: RunDir, attempt: int, rank: int, exit_code: int, log: Path) -> None:
    """Write the failure file of a rank that did not write it, with its output from the agent's `log`."""
    number = -exit_code if exit_code < 0 else None
    crash = find_crash_output(run.rank_log(attempt, rank), log, number=number)
    record = {
        "time": time.time(),
        "order": None,
        "rank": rank,
        "host": host_name(os.environ),
        "kind": "signal" if number else "exit",
        "error": signal_name(number) if number else f"exit code {exit_code}",
        "message": crash.message,
        "traceback": crash.traceback,
        "log": str(crash.log),
    }
    make_folder(run.failures)
    write_atomic(run.failure(attempt, rank), json.dumps(record, indent=1) + "\n")


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
