"""Observe a process of a rank: the worker, or a Python process that its command has started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from hpctrain.cluster import Ranks
from hpctrain.errors import EnvironmentMismatch
from hpctrain.rundir import INDEPENDENT_RANKS_VARIABLE, RunDir
from hpctrain.runtime.program import heartbeat
from hpctrain.runtime.program.script_monitor import ScriptMonitor
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.rank_activity import activity, has_process_group
from hpctrain.runtime.stopping.stop_signals import exit_after_step
from hpctrain.runtime.supervisor_connection import Connection, Message, start_heartbeat

#: Optimizer steps without a process group after which a rank fails.
MAX_STEPS_ALONE = 20

#: Remedies for frameworks that silently train on a single rank, by module.
_ADVICE = {
    "lightning.pytorch": "Pass devices and num_nodes to Lightning's Trainer",
    "pytorch_lightning": "Pass devices and num_nodes to Lightning's Trainer",
    "accelerate": "If the nodes have no GPUs, set ACCELERATE_USE_CPU=true or pass cpu=True to Accelerator",
}
_OTHER_ADVICE = (
    "Call torch.distributed.init_process_group and wrap the model in DistributedDataParallel. If the script "
    "has an argument --local_rank, which neither hpctrain nor torchrun passes, use the variable LOCAL_RANK "
    "instead"
)


class ProcessObserver:
    """Counts and records the steps of this process, samples its main thread, and sends both as heartbeats."""

    def __init__(
        self, run: RunDir, attempt: int, ranks: Ranks, environ: Mapping[str, str], *, records_steps: bool
    ) -> None:
        self.run, self.attempt, self.ranks = run, attempt, ranks
        self._environ, self._started_with = environ, dict(environ)
        self._world_size = int(environ["WORLD_SIZE"])
        self._may_train_alone = self._world_size == 1 or environ.get(INDEPENDENT_RANKS_VARIABLE) == "1"
        self._step_log = StepLog(run, attempt) if records_steps else None

    def start(self, connect: Callable[[], Connection]) -> None:
        """Sample this process, and report it through a connection."""
        ScriptMonitor(step_log=self._step_log).start()
        start_heartbeat(connect, self.heartbeat_message, self.on_message, heartbeat.on_heartbeat_sent)

    def heartbeat_message(self) -> Message:
        return heartbeat.heartbeat_message(self._started_with)

    def on_message(self, connection: Connection, message: Message) -> None:
        heartbeat.on_message(self.run, self.attempt, self.ranks, connection, message)

    def after_step(self) -> None:
        """Check the rank after an optimizer step, and exit if all ranks stop after this step."""
        if not self._may_train_alone:
            self._may_train_alone = has_process_group()
            if not self._may_train_alone and activity.optimizer_steps >= MAX_STEPS_ALONE:
                self.check_end()
        exit_after_step()

    def check_end(self) -> None:
        """Raise an error if the program has trained alone, in a run with several ranks."""
        if self._may_train_alone or activity.is_managed or not activity.optimizer_steps:
            return
        self._may_train_alone = True
        advice = next((_ADVICE[module] for module in _ADVICE if module in sys.modules), _OTHER_ADVICE)
        raise EnvironmentMismatch(
            f"The run has {self._world_size} ranks, but rank {self._environ['RANK']} completed "
            f"{activity.optimizer_steps} optimizer steps without a process group, so each rank trains alone. "
            f"{advice}. If the ranks are supposed to be independent, submit with --independent-ranks."
        )
