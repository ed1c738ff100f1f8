"""Set up training whose result does not depend on the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.device_selection import describe_hardware

#: Makes cuBLAS deterministic; read when its first handle is created.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class ElasticDeterminism:
    """Facts that the bits of a training depend on, besides its settings, and the exponents of its sums."""

    def __init__(self, context: DistributedContext, grain_size: int) -> None:
        """Collective. Use the same number of threads on all ranks."""
        self._device = context.device
        self._facts = {
            "grain_size": grain_size,
            "threads": context.broadcast_from_main(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "device": "; ".join(sorted(set(context.all_gather(describe_hardware(context.device))))),
        }
        self.exponents: dict[str, int] = {}
        if context.device.type == "cuda":
            os.environ.setdefault(*_CUBLAS)

    @property
    def hardware_differs(self) -> bool:
        return "; " in self._facts["device"]

    @contextmanager
    def deterministic_algorithms(self) -> Iterator[None]:
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            torch.backends.mha.get_fastpath_enabled(),
            torch.get_num_threads(),
        )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # Used in evaluations, but not with sharded parameters.
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_num_threads(self._facts["threads"])
        try:
            yield
        finally:
            enabled, warn_only, fill, benchmark, fastpath, threads = before
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = benchmark
            torch.backends.mha.set_fastpath_enabled(fastpath)
            torch.set_num_threads(threads)

    def state_dict(self) -> dict[str, Any]:
        return {**self._facts, "exponents": dict(self.exponents)}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the exponents and the number of threads; return remarks on other facts that differ."""
        if state["grain_size"] != self._facts["grain_size"]:
            raise UserError(
                f"The checkpoint was saved with grain_size={state['grain_size']}, but this script uses "
                f"{self._facts['grain_size']}, so the result would differ. Restore the old value, or start a "
                "new run in a new folder."
            )
        self.exponents.clear()
        self.exponents.update(state["exponents"])
        self._facts["threads"] = state["threads"]
        torch.set_num_threads(state["threads"])
        return [
            f"{subject} is {self._facts[name]}, but was {state[name]} when the checkpoint was saved, so the "
            "result may differ from that of an undisturbed run."
            for name, subject in (("torch", "The version of torch"), ("device", "The device"))
            if state[name] != self._facts[name]
        ]
