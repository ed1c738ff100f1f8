"""Observation of a Python process of a command: steps, stacks and agreed stop, as in a script."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from hpctrain.cluster import Ranks
from hpctrain.errors import UserError
from hpctrain.rundir import ATTEMPT_VARIABLE, CHILD_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.failure_file import failure_record, write_failure
from hpctrain.runtime.heartbeat import heartbeat_message, on_message
from hpctrain.runtime.program.child_relay import connect_to_worker
from hpctrain.runtime.program.process_group_check import ProcessGroupCheck
from hpctrain.runtime.program.script_monitor import ScriptMonitor
from hpctrain.runtime.program.step_hook import STEP_HOOK_VARIABLE, install_step_hook
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.stopping.agreed_stop import agreed_stop
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS, start_signal_recorder
from hpctrain.runtime.stopping.stop_signals import exit_after_step, exit_on_stop_signal
from hpctrain.runtime.supervisor_connection import start_heartbeat
from hpctrain.spec.launcher import RANK_LAUNCHERS

#: Variables that a launcher inside of the command, such as torchrun, sets for each of its processes.
_LAUNCH_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")


def observe_process() -> None:
    """Observe this process from now on, unless an observed process started it as a helper.

    Helpers, such as data workers, do not train. Launchers do not train either, but the processes that they
    start do.
    """
    if CHILD_VARIABLE not in os.environ or os.path.basename(sys.argv[0]) in RANK_LAUNCHERS:
        return
    told = json.loads(os.environ[CHILD_VARIABLE])
    launch = [os.environ.get(name) for name in _LAUNCH_VARIABLES]
    if told.get("launch") == launch and told["pid"] != os.getpid():
        return
    try:
        connect_to_worker(told["socket"]).close()
    except OSError:  # Another job has inherited the variables.
        return
    os.environ[CHILD_VARIABLE] = json.dumps({**told, "launch": launch, "pid": os.getpid()})
    ranks = Ranks(**told["ranks"])
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    is_rank = launch[1:] == [str(ranks.rank), str(ranks.world_size)]
    if is_rank and threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGQUIT)
        if all(signal.getsignal(number) is signal.SIG_DFL for number in STOP_SIGNALS):
            agreed_stop.is_enabled = True
            start_signal_recorder()
            exit_on_stop_signal()
    if os.environ.get(STEP_HOOK_VARIABLE) != "0":
        group_check = ProcessGroupCheck(os.environ)
        install_step_hook(partial(_after_step, group_check, run, attempt, ranks), is_restart=attempt > 0)
    start_heartbeat(
        partial(connect_to_worker, told["socket"]),
        partial(heartbeat_message, dict(os.environ)),
        partial(on_message, run, attempt, ranks),
    )
    step_log = StepLog(run, attempt) if launch[1] == "0" else None
    if step_log is not None:
        step_log.write_at_exit()
    ScriptMonitor(step_log=step_log).start()


def _after_step(group_check: ProcessGroupCheck, run: RunDir, attempt: int, ranks: Ranks) -> None:
    """Check the process after an optimizer step. An error of the user becomes the failure of the rank."""
    try:
        group_check.after_step()
    except UserError as error:
        log = run.rank_log(attempt, ranks.rank)
        environ = {**os.environ, "RANK": str(ranks.rank)}
        write_failure(run.failure(attempt, ranks.rank), failure_record(error, environ), log, environ)
        raise
    exit_after_step()
