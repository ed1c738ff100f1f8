"""Export of a checkpoint to a single file that other programs can read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.io.coordination import RankCoordinator
from hpctrain.checkpoint.io.loading import LoadedCheckpoint, VerifiedCheckpoint, load
from hpctrain.errors import CheckpointError, UserError
from hpctrain.files import fsync_path

_SAFETENSORS, _TORCH = (".safetensors",), (".pt", ".pth")


def export_checkpoint(checkpoint: Path, file: Path, *, everything: bool = False) -> list[str]:
    """Write the module's weights, or the complete state, to `file` by a rename; return messages."""
    suffix = file.suffix.lower()
    if suffix not in (*_SAFETENSORS, *_TORCH):
        raise UserError(f"The extension of {file} must be .safetensors, .pt or .pth.")
    if everything and suffix not in _TORCH:
        raise UserError(f"{file} can store only tensors, but --all also exports other state. Use a .pt file.")
    loaded = load_on_cpu(checkpoint)
    step, state = loaded.step, loaded.state
    if everything:
        _write(file, lambda path: torch.save({"step": step, **state}, path))
        return [f"Wrote {file}: all saved state except the random state (step {step})"]
    weights = state["module"]
    if suffix in _TORCH:
        _write(file, lambda path: torch.save(weights, path))
        return [f"Wrote {file}: {_count(weights)} (step {step})"]
    tensors = {name: value.contiguous() for name, value in _tensors(weights)}
    _write(file, lambda path: save_file(tensors, path, {"format": "pt", "step": str(step)}))
    omitted = sorted(set(weights) - set(tensors))
    return [
        f"Wrote {file}: {_count(tensors)} (step {step})",
        *(f"omitted {name}, which is not a tensor; a .pt file would include it" for name in omitted),
    ]


def load_on_cpu(folder: Path) -> LoadedCheckpoint:
    return load(RankCoordinator(None, 0.0), VerifiedCheckpoint(folder, read_verified(folder)), None)


def _tensors(weights: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, value) for name, value in weights.items() if isinstance(value, torch.Tensor))


def _count(weights: dict[str, Any]) -> str:
    numbers = sum(tensor.numel() for _, tensor in _tensors(weights))
    return f"{len(weights)} tensors, {numbers:,} values"


def _write(file: Path, write: Callable[[Path], object]) -> None:
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file} cannot be written, because the folder {file.parent} does not exist.")
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    except (RuntimeError, SafetensorError) as error:  # both libraries raise these errors if the disk is full
        raise CheckpointError(f"{file} was not written: {str(error).partition(chr(10))[0]}") from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(file.absolute().parent)
