"""hpctrain: one PyTorch script on Slurm, with the result of an undisturbed run whatever happens.

What needs torch is imported when it is first used, so that the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.errors import (
    BrokenCheckpoint,
    CheckpointError,
    EnvironmentMismatch,
    HpctrainError,
    MeetingFailed,
    RunFailed,
    RunNotFound,
    SchedulerError,
    SpecError,
    UserError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from hpctrain.cluster import Ranks, compress_hostlist, detect, expand_hostlist
    from hpctrain.jobs.executor import Executor
    from hpctrain.jobs.options import SubmitOptions
    from hpctrain.jobs.runs import Run
    from hpctrain.jobs.spec import JobSpec
    from hpctrain.jobs.states import RunState
    from hpctrain.jobs.status import RunStatus
    from hpctrain.jobs.submit import submit
    from hpctrain.rundir import RunDir
    from hpctrain.runtime.stop import should_stop
    from hpctrain.training import Module, Trainer
    from hpctrain.training.callbacks import Callback, EarlyStopping
    from hpctrain.training.data.randomness import sample_generator
    from hpctrain.training.session import session
    from hpctrain.training.strategies import Strategy, register_strategy

__version__ = "0.1.0"

__all__ = [
    # on the login node
    "submit",
    "Executor",
    "SubmitOptions",
    "Run",
    "RunState",
    "RunStatus",
    "RunDir",
    "JobSpec",
    # in a rank
    "Module",
    "Trainer",
    "Callback",
    "EarlyStopping",
    "Strategy",
    "register_strategy",
    "session",
    "sample_generator",
    "should_stop",
    "detect",
    "Ranks",
    "expand_hostlist",
    "compress_hostlist",
    # errors
    "HpctrainError",
    "MeetingFailed",
    "UserError",
    "SpecError",
    "EnvironmentMismatch",
    "RunNotFound",
    "SchedulerError",
    "RunFailed",
    "WaitTimeout",
    "CheckpointError",
    "BrokenCheckpoint",
]

_HOMES = {
    "Callback": "hpctrain.training.callbacks",
    "EarlyStopping": "hpctrain.training.callbacks",
    "Executor": "hpctrain.jobs.executor",
    "JobSpec": "hpctrain.jobs.spec",
    "Module": "hpctrain.training",
    "Ranks": "hpctrain.cluster",
    "Run": "hpctrain.jobs.runs",
    "RunDir": "hpctrain.rundir",
    "RunState": "hpctrain.jobs.states",
    "RunStatus": "hpctrain.jobs.status",
    "Strategy": "hpctrain.training.strategies",
    "SubmitOptions": "hpctrain.jobs.options",
    "Trainer": "hpctrain.training",
    "compress_hostlist": "hpctrain.cluster",
    "detect": "hpctrain.cluster",
    "expand_hostlist": "hpctrain.cluster",
    "register_strategy": "hpctrain.training.strategies",
    "sample_generator": "hpctrain.training.data.randomness",
    "session": "hpctrain.training.session",
    "should_stop": "hpctrain.runtime.stop",
    "submit": "hpctrain.jobs.submit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
