"""Schedule, commit and prune checkpoints that another library writes to a run folder."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from hpctrain.checkpoint.io.checkpoint_dir import boot_identity, new_save_token
from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.files import fsync_path, make_folder, write_atomic
from hpctrain.record_types import RankPhase
from hpctrain.rundir import RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import init_distributed
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.resumed_values import IgnoredValue
from hpctrain.runtime.stopping.stop_signals import should_stop
from hpctrain.training.base import rng
from hpctrain.training.base.tensors import local_part
from hpctrain.training.observe.run_writer import RunWriter
from hpctrain.training.saving.unsaved_objects import UnsavedNumbers

#: Seconds between two checkpoints by default.
EVERY_S = 600.0
#: The object that trains, by run folder.
_training_of: dict[str, LibraryCheckpoints] = {}


def check_num_ranks(num_used: int, user: str, remedy: str) -> None:
    if num_used != (world_size := detect(os.environ).world_size):
        raise UserError(
            f"The {user} uses only {num_used} of the job's {world_size} ranks. If the nodes have no GPUs, "
            f"use {remedy}."
        )


class LibraryCheckpoints:
    """Files or folders `PREFIX-STEP` in the run's `checkpoints`, in the format of a library; collective."""

    def __init__(
        self,
        prefix: str,
        *,
        keep_last: int = 3,
        every_n_steps: int | None = None,
        marker: str | None = None,
        to_optimizer_step: Callable[[int], int] = lambda step: step,
    ) -> None:
        """Form the process group if necessary; a file `marker` makes a folder written in place valid."""
        self.context = init_distributed(detect(os.environ), os.environ)
        folder = os.environ.get(RUN_DIR_VARIABLE)
        self.run = RunDir(Path(folder)) if folder else None
        self._prefix, self._keep_last, self._every_n_steps = prefix, keep_last, every_n_steps
        self._marker, self._to_optimizer_step = marker, to_optimizer_step
        self._watched: Sequence[nn.Module | torch.optim.Optimizer] = ()
        self._unsaved: UnsavedNumbers | None = None
        self._name = re.compile(rf"{re.escape(prefix)}-(\d+)")
        self._saved_at = time.monotonic()
        self._step = 0
        """Step of the last decision, or of the loaded checkpoint."""
        self._log = RunWriter(self.run, self.context, os.environ, partial(print, flush=True))

    def watch(self, *modules_and_optimizers: nn.Module | torch.optim.Optimizer) -> None:
        """Save nothing after the parameters or optimizer states become NaN or infinite."""
        self._watched = modules_and_optimizers
        modules = [value for value in modules_and_optimizers if isinstance(value, nn.Module)]
        self._unsaved = UnsavedNumbers(modules)
        if not self._are_finite():
            self._watched = ()

    def is_saveable(self, step: int) -> bool:
        """Return false, and print the reason, if the watched state of `step` is not finite on all ranks."""
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is not None and self.run is not None:
            self.print_message(unsaved.remark())
        if self.run is None or not self._watched or self._are_finite():
            return True
        self.print_message(
            f"after step {step}, the optimizer state or the parameters contain NaN or infinite values. They "
            "are not saved, so that the newest checkpoint remains the last finite one."
        )
        self._saved_at = time.monotonic()
        return False

    def _are_finite(self) -> bool:
        are_finite = all(map(_is_finite, _trained_tensors(self._watched)))
        return self.context.all_reduce_min(float(are_finite)) > 0

    def newest(self) -> Path | None:
        if self.run is not None and _training_of.setdefault(str(self.run.path), self) is not self:
            raise UserError(
                "This process has already trained with another object that saves to this run folder, so "
                "their checkpoints would be confused. Train only once per run, such as with `hpctrain sweep`."
            )
        steps = self._steps() if self.context.ranks.is_main else {}
        name = self.context.broadcast_from_main(steps[max(steps)].name if steps else None)
        return None if name is None or self.run is None else self.run.checkpoints / name

    def step_of(self, path: Path) -> int:
        match = self._name.fullmatch(path.name)
        assert match is not None
        return int(match[1])

    def log_resumed(self, path: Path) -> None:
        self._step = self.step_of(path)
        self._log.write_resumed(self._to_optimizer_step(self._step), path, 0.0)
        self.print_message(f"resumed after step {self._step} from {path}")

    def report(self, ignored: Sequence[IgnoredValue], messages: Iterable[str | None], remedy: str) -> None:
        self._log.write_ignored(ignored)
        for message in (*(f"{value} {remedy}" for value in ignored), *messages):
            self.print_message(message)

    def decide(self, step: int) -> Literal["stop", "save"] | None:
        """Return the action of all ranks after `step`: stop after a save, save, or neither."""
        if should_stop():
            return "stop"
        if self.run is None:
            return None
        if self._every_n_steps is not None:
            # Steps between two optimizer steps are not passed to this method.
            previous, self._step = self._step, step
            return "save" if step // self._every_n_steps > previous // self._every_n_steps else None
        # Only the clock of rank 0 is used.
        due = self.context.ranks.is_main and time.monotonic() - self._saved_at >= EVERY_S
        return "save" if self.context.all_reduce_min(-float(due)) < 0 else None

    def save(self, step: int, write: Callable[[Path], object]) -> None:
        """Call `write` with a hidden name, and commit the checkpoint by a rename, if it is finite."""
        if self.run is None or not self.is_saveable(step):
            return
        begun = time.monotonic()
        folder, name = self.run.checkpoints, f"{self._prefix}-{step}"
        token = self.context.broadcast_from_main(f"{boot_identity()}-{new_save_token()}")
        hidden = folder / f".saving-{name}-{token}"
        with activity.in_phase(RankPhase.SAVE):
            if self.context.ranks.is_main:
                make_folder(folder)
                for leftover in folder.glob(f".saving-{self._prefix}-*"):
                    _remove(leftover)
            self.context.barrier()
            write(hidden)
            self.context.barrier()
            if self.context.ranks.is_main and not (folder / name).exists():
                size = _sync(hidden)
                hidden.rename(folder / name)
                fsync_path(folder)
                self._log.write_checkpoint(
                    self._to_optimizer_step(step), folder / name, size, time.monotonic() - begun
                )
                self._prune(self._keep_last)
            self.context.barrier()
        self._saved_at = time.monotonic()

    def mark(self, step: int, keep_last: int | None = None, best: str | None = None) -> None:
        """Commit the checkpoint of `step`, which the library has written in place, and delete old ones."""
        if self.run is None or self._marker is None:
            return
        self.context.barrier()
        if self.context.ranks.is_main:
            path = self.run.checkpoints / f"{self._prefix}-{step}"
            size = _sync(path)
            write_atomic(path / self._marker, f"{step}\n")
            self._log.write_checkpoint(step, path, size, 0.0)
            if keep_last:
                self._prune(keep_last, best)
        self.context.barrier()
        self._saved_at = time.monotonic()

    def restore_rng_state(self, states: Sequence[dict[str, torch.Tensor]], step: int) -> None:
        """Restore the random state of this rank; with another number of ranks, seed each rank differently."""
        ranks = self.context.ranks
        of_rank = states[ranks.rank] if len(states) == ranks.world_size else None
        rng.resume_rng_state(of_rank, "rank", ranks.rank, "step", step)

    def print_message(self, message: str | None) -> None:
        if message and self.context.ranks.is_main:
            print(f"hpctrain: {message}", flush=True)

    def _prune(self, keep_last: int, best: str | None = None) -> None:
        for _, path in sorted(self._steps().items())[:-keep_last]:
            if path.name != best:
                _remove(path)

    def _steps(self) -> dict[int, Path]:
        if self.run is None:
            return {}
        folder = self.run.checkpoints
        matches = [match for name in self.run.storage.names(folder) if (match := self._name.fullmatch(name))]
        return {
            int(match[1]): folder / match[0]
            for match in matches
            if self._marker is None or (folder / match[0] / self._marker).exists()
        }


def _trained_tensors(watched: Iterable[nn.Module | torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for stateful in watched:
        if isinstance(stateful, nn.Module):
            yield from stateful.parameters()
        else:
            for state in stateful.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _is_finite(tensor: torch.Tensor) -> bool:
    local = local_part(tensor.detach())
    # There is no check for numbers of eight bits.
    return local.dtype.itemsize == 1 or bool(local.isfinite().all())


def _sync(path: Path) -> int:
    """Sync a file, or all files of a folder, to disk; return their size in bytes."""
    size = 0
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fsync_path(entry)
        size += entry.stat().st_size if entry.is_file() else 0
    return size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
