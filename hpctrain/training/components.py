"""Components shared by the training loop, validation, messages and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.data.step_source import StepSource
from hpctrain.training.module import Module
from hpctrain.training.observe.run_writer import Progress, RunWriter
from hpctrain.training.observe.step_timers import ComputeTimer, StepTimer
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.strategies import Strategy
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState


@dataclass(frozen=True)
class Components:
    """Shared components of a training run, created by `build_training_loop`."""

    settings: TrainerConfig
    context: DistributedContext
    stop: StopFlag
    """Stop flag of this rank."""
    module: Module
    strategy: Strategy
    source: StepSource
    state: TrainingState
    callbacks: CallbackList
    progress: Progress
    log: RunWriter
    step_timer: StepTimer
    compute_timer: ComputeTimer
    replica_check: ReplicaCheck | None = None

    def end_if_requested(self) -> None:
        if self.state.finished or not self.callbacks:
            return
        reason = next(filter(None, self.context.all_gather(self.callbacks.ending)), None)
        if reason is not None:
            self.state.finished = True
            self.progress.print_message(f"training ends at step {self.state.step}: {reason}")
