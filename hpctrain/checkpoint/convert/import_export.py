"""Convert checkpoints to and from the single files of other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpctrain.checkpoint.convert.external_formats import ExternalState, parse_external_state
from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import LoadedCheckpoint, VerifiedCheckpoint, load
from hpctrain.checkpoint.io.retention import KEEP_ALL
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError, UserError
from hpctrain.files import fsync_path, make_folder
from hpctrain.rundir import RunDir

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
    return load(RankCoordinator(False, 0.0), VerifiedCheckpoint(folder, read_verified(folder)), None)


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


def import_checkpoint(
    file: Path, run: RunDir, *, step: int | None = None, weights_only: bool = False, allow: Sequence[str] = ()
) -> list[str]:
    """Create the checkpoint of `step`, or of the step in the file, from `file`; return messages."""
    external = parse_external_state(_read(file, allow), str(file))
    if weights_only:
        external = external.weights_alone()
    if step is None:
        step = external.step or 0
    newest = max((checkpoint.step for checkpoint in list_checkpoints(run)[0]), default=-1)
    if newest >= step:
        raise UserError(
            f"{run.checkpoints} already contains a checkpoint of step {newest}, but {file} would be imported "
            f"as step {step}. A run resumes from its newest checkpoint. Use a higher --step or another run "
            "folder."
        )
    make_folder(run.path)
    store = CheckpointStore(run.checkpoints, retention=KEEP_ALL)
    saved = store.save(step, external.tree(), {})
    store.close()
    return [f"Wrote {saved.path}: step {step}, from {file} ({external.origin})", *_import_notes(external)]


def _read(file: Path, allow: Sequence[str]) -> Any:
    """Return the content of the file, on the CPU, without running code from the file."""
    if file.suffix.lower() == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is not a safetensors file: {error}.") from error
    with torch.serialization.safe_globals([_class(name) for name in allow]):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            if classes := _other_classes(file):
                raise UserError(
                    f"{file} refers to {', '.join(classes)}, so loading the file could execute code. If you "
                    f"trust the file, add {' '.join(f'--allow {name}' for name in classes)}. Otherwise, "
                    "change the program that wrote the file to save only the weights: "
                    "torch.save({'state_dict': model.state_dict()}, FILE)."
                ) from error
            reason = describe_exception(error).rstrip(".")
            raise UserError(f"{file} cannot be loaded by torch.load: {reason}.") from error


def _other_classes(file: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # noqa: BLE001 (an unreadable file has no names)
        return []


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{name!r} (--allow) cannot be imported: {error}. Use the full name of an importable class: "
            "MODULE.CLASS."
        ) from error


def _import_notes(external: ExternalState) -> Iterator[str]:
    states_by_name: Mapping[str, list[Any] | None] = {
        "optimizer": external.optimizers,
        "scheduler": external.schedulers,
    }
    taken = [
        f"{len(states)} {name}{'s' * (len(states) != 1)}" for name, states in states_by_name.items() if states
    ]
    yield "imported: " + ", ".join([f"{len(external.weights)} weights and buffers", *taken])
    for name, states in states_by_name.items():
        if not states:
            start = "from scratch" if name == "optimizer" else "at its first step"
            yield f"no {name} state: the {name} starts {start}"
    if external.omitted:
        yield f"omitted: {', '.join(external.omitted)}"
    yield from external.remarks
    yield (
        "not imported: the position in the data and the random state. The run uses its own sample "
        "order, starting after the imported number of steps."
    )
