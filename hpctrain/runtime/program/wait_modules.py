"""Modules in which a rank waits for other ranks or for data."""

from __future__ import annotations

#: Modules in which a rank waits for other ranks, or for a device that waits.
_EXCHANGE = (
    *("torch.distributed", "torch.autograd", "torch.nn.parallel", "torch.cuda"),
    *(
        "hpctrain.training.loop.step_sync",
        "hpctrain.runtime.distributed_context",
        "hpctrain.checkpoint.io.coordination",
    ),
)
#: Modules in which a rank waits for batches of its data workers.
_DATA = ("torch.utils.data", "multiprocessing", "queue")
#: Modules that call data sets in the process of the rank.
_LOADER = ("torch.utils.data",)


def waits_for_ranks(module: str) -> bool:
    """Return true if code of this module waits for other ranks."""
    return _is_in(module, _EXCHANGE)


def waits_for_data(module: str) -> bool:
    return _is_in(module, _DATA)


def loads_data(module: str) -> bool:
    """Return true if this module calls data sets, samplers and collate functions."""
    return _is_in(module, _LOADER)


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
