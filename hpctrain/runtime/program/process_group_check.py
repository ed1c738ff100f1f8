"""Detect ranks that each train alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

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
_OTHER_ADVICE = (
    "Call torch.distributed.init_process_group and wrap the model in DistributedDataParallel. If the script "
    "has an argument --local_rank, which neither hpctrain nor torchrun passes, use the variable LOCAL_RANK "
    "instead"
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
        steps = activity.optimizer_steps
        advice = next((_ADVICE[module] for module in _ADVICE if module in sys.modules), _OTHER_ADVICE)
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
