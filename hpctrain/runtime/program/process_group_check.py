"""Check that the ranks train together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpctrain.errors import EnvironmentMismatch
from hpctrain.rundir import INDEPENDENT_RANKS_VARIABLE
from hpctrain.runtime.rank_activity import activity

#: Optimizer steps without a process group after which a rank fails.
MAX_STEPS_ALONE = 20

#: Libraries that exchange gradients without torch's process groups.
_OTHER_COMMUNICATION = ("horovod", "mpi4py")
#: Remedies for frameworks that silently train on a single rank, by module.
_ADVICE = {
    "lightning.pytorch": "Pass devices and num_nodes to Lightning's Trainer",
    "pytorch_lightning": "Pass devices and num_nodes to Lightning's Trainer",
    "accelerate": "If the nodes have no GPUs, set ACCELERATE_USE_CPU=true or pass cpu=True to Accelerator",
}
_OTHER_ADVICE = "Call torch.distributed.init_process_group and wrap the model in DistributedDataParallel"
_LOCAL_RANK_ADVICE = (
    ". The script has an argument --local_rank, which neither hpctrain nor torchrun passes. Read the "
    "environment variable LOCAL_RANK instead, for example as the default of the argument"
)


class ProcessGroupCheck:
    """Check for a rank that trains without a process group in a run with several ranks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._world_size = int(environ["WORLD_SIZE"])
        self._is_settled = self._world_size == 1 or environ.get(INDEPENDENT_RANKS_VARIABLE) == "1"

    def after_step(self) -> None:
        if not self._is_settled:
            self._is_settled = has_process_group()
            if not self._is_settled and activity.optimizer_steps >= MAX_STEPS_ALONE:
                self.check_end()

    def check_end(self) -> None:
        """Check at the end of the program. A program without optimizer steps passes."""
        if self._is_settled or activity.is_managed or not activity.optimizer_steps:
            return
        self._is_settled = True
        advice = _describe_advice()
        steps = activity.optimizer_steps
        raise EnvironmentMismatch(
            f"The run has {self._world_size} ranks, but rank {os.environ['RANK']} completed {steps} "
            f"optimizer steps without a process group, so each rank trains alone. {advice}. If the ranks "
            "are supposed to be independent, submit with --independent-ranks."
        )


def has_process_group() -> bool:
    """Return true if this process has or had a process group of torch, or communicates in another way."""
    if any(name in sys.modules for name in _OTHER_COMMUNICATION):
        return True
    # Another thread may be importing the module, which then lacks attributes.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    is_initialized = getattr(c10d, "is_initialized", None)
    if is_initialized is None:
        return False
    # torch keeps the address of a group that was destroyed.
    return is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None


def _describe_advice() -> str:
    """Return the remedy for the framework of this process, or for its `--local_rank` argument."""
    for module, advice in _ADVICE.items():
        if module in sys.modules:
            return advice
    return _OTHER_ADVICE + (_LOCAL_RANK_ADVICE if _takes_local_rank() else "")


def _takes_local_rank() -> bool:
    """Return true if the script has an argument `--local_rank` or `--local-rank`."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str):
        return False
    with suppress(OSError, ValueError):
        return bool(re.search(r"--local[-_]rank\b", Path(path).read_text(errors="replace")))
    return False


def find_rendezvous(frame: FrameType | None, environ: Mapping[str, str]) -> str | None:
    """Return the address at which a thread waits for the process group; None if it does not wait for it."""
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "init_process_group" and module == "torch.distributed.distributed_c10d":
            method = frame.f_locals.get("init_method") or "env://"
            if frame.f_locals.get("store") is not None:
                return "the store of the script"
            if str(method).startswith("env://"):
                return f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
            return str(method)
        frame = frame.f_back
    return None
