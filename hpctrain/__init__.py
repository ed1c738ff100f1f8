"""hpctrain: run a PyTorch script on Slurm, with the result of an uninterrupted run despite failures.

Modules that require torch are imported on first use, to speed up the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain._version import __version__ as __version__
from hpctrain.errors import (
    BadLoss,
    CheckpointError,
    CorruptCheckpoint,
    DataWorkerKilled,
    DiskFull,
    EnvironmentMismatch,
    HpctrainError,
    RendezvousError,
    RunFailed,
    RunNotFound,
    SchedulerError,
    SilentCorruption,
    SpecError,
    StagingError,
    Unauthenticated,
    UserError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from hpctrain.cluster import Ranks, compress_hostlist, detect, expand_hostlist
    from hpctrain.jobs.executor import Executor
    from hpctrain.jobs.options.option_table import SubmitOptions
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.jobs.submit.submit_prepared import submit
    from hpctrain.jobspec.job_spec import JobSpec
    from hpctrain.rundir import RunDir
    from hpctrain.runtime.stopping.stop_signals import should_stop
    from hpctrain.slurm.states import RunState
    from hpctrain.training import Module, Trainer
    from hpctrain.training.algorithms import BaguaStrategy
    from hpctrain.training.callbacks import Callback, EarlyStopping
    from hpctrain.training.data.mixture import Mixture
    from hpctrain.training.data.sample_seeds import sample_generator
    from hpctrain.training.data.sampler_plan import LengthGroupedBatchSampler
    from hpctrain.training.data.stateful_batch_sampler import StatefulBatchSampler
    from hpctrain.training.loop.session import session
    from hpctrain.training.observe.run_writer import log_metrics
    from hpctrain.training.saving.checkpointer import Checkpointer
    from hpctrain.training.strategies import Strategy, register_strategy

__all__ = [
    # on the login node
    "submit", "Executor", "SubmitOptions", "Run", "RunState", "RunStatus", "RunDir", "JobSpec",
    # in a rank
    "Module", "Trainer", "Callback", "EarlyStopping", "Strategy", "register_strategy", "BaguaStrategy",
    "session", "sample_generator", "Mixture", "LengthGroupedBatchSampler", "StatefulBatchSampler",
    "Checkpointer", "log_metrics", "should_stop",
    "detect", "Ranks", "expand_hostlist", "compress_hostlist",
    # errors
    "HpctrainError", "RendezvousError", "UserError", "SilentCorruption", "SpecError", "EnvironmentMismatch",
    "RunNotFound", "SchedulerError", "RunFailed", "WaitTimeout", "CheckpointError", "CorruptCheckpoint",
    "DataWorkerKilled", "DiskFull", "BadLoss", "StagingError", "Unauthenticated",
]  # fmt: skip

#: Modules of the names that are imported on first use.
_HOMES = {
    "BaguaStrategy": "hpctrain.training.algorithms",
    "Callback": "hpctrain.training.callbacks",
    "Checkpointer": "hpctrain.training.saving.checkpointer",
    "EarlyStopping": "hpctrain.training.callbacks",
    "Executor": "hpctrain.jobs.executor",
    "JobSpec": "hpctrain.jobspec.job_spec",
    "LengthGroupedBatchSampler": "hpctrain.training.data.sampler_plan",
    "Mixture": "hpctrain.training.data.mixture",
    "Module": "hpctrain.training",
    "Ranks": "hpctrain.cluster",
    "Run": "hpctrain.jobs.runs.run",
    "RunDir": "hpctrain.rundir",
    "RunState": "hpctrain.slurm.states",
    "RunStatus": "hpctrain.jobs.runs.run_status",
    "StatefulBatchSampler": "hpctrain.training.data.stateful_batch_sampler",
    "Strategy": "hpctrain.training.strategies",
    "SubmitOptions": "hpctrain.jobs.options.option_table",
    "Trainer": "hpctrain.training",
    "compress_hostlist": "hpctrain.cluster",
    "detect": "hpctrain.cluster",
    "expand_hostlist": "hpctrain.cluster",
    "log_metrics": "hpctrain.training.observe.run_writer",
    "register_strategy": "hpctrain.training.strategies",
    "sample_generator": "hpctrain.training.data.sample_seeds",
    "session": "hpctrain.training.loop.session",
    "should_stop": "hpctrain.runtime.stopping.stop_signals",
    "submit": "hpctrain.jobs.submit.submit_prepared",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import gc
    from importlib import import_module

    is_enabled = gc.isenabled()
    gc.disable()  # Frequent collections take a tenth of the time of a submission.
    try:
        value = getattr(import_module(_HOMES[name]), name)
    finally:
        if is_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
