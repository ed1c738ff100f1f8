"""Import of another trainer's file as a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hpctrain.checkpoint.convert.external_formats import ExternalState, parse_external_state
from hpctrain.checkpoint.io.checkpoint_dir import KEEP_ALL
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError
from hpctrain.files import make_folder
from hpctrain.rundir import RunDir


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
            raise UserError(f"{file} cannot be loaded by torch.load: {_first_line(error)}.") from error


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


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
