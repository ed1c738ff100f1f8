"""Emergency checkpoints: after the failure of a rank, another rank saves its state in the memory of its node.

With equal replicas, every rank has the complete state, except for the results of the last steps. Each rank
records these in memory that survives its process, and a rank on another node keeps a copy of the record. The
next attempt loads the state, exchanges the recorded results again, and continues with the next step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from hpctrain.authentication import code, read_secret
from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.io.coordination import RankCoordinator
from hpctrain.checkpoint.io.loading import LoadedCheckpoint, VerifiedCheckpoint, load
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.tier.local_tier import tier_folder
from hpctrain.checkpoint.tier.rank_record import RankRecord, read_record, read_tensors
from hpctrain.errors import CheckpointError
from hpctrain.files import is_locked, make_private_folder
from hpctrain.records.lease import counts_as_alive, newest_lease
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    EMERGENCY_CHECKPOINT_VARIABLE,
    VERIFY_STEPS_VARIABLE,
    RunDir,
    checkpoint_folder_name,
    is_metrics,
    list_checkpoint_steps,
)
from hpctrain.runtime.program.emergency_save import emergency_save
from hpctrain.slurm.states import RunState
from hpctrain.training.algorithms import Algorithm
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.lightning_hooks import lightning_base
from hpctrain.training.module import Module, is_manual, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import parameters_of
from hpctrain.training.saving.copy_schedule import CopySchedule
from hpctrain.training.saving.record_exchange import RecordExchange
from hpctrain.training.strategies.broadcast_buffers import broadcast_buffers

_SHARED_MEMORY = Path("/dev/shm")
#: Suffix of the folder of a run.
_SUFFIX = "-emergency"
#: Link to the run in this folder.
_RUN_LINK = "run"


@dataclass(frozen=True)
class RecordedStep:
    """Result of a step that the failed attempt trained, for a single rank."""

    step: int
    epoch: int
    sums: MetricAccumulator


@dataclass(frozen=True)
class Recovery:
    """State of a failed attempt, loaded by all ranks.

    Attributes:
        loaded: the state.
        read_step: last step whose result is part of the state.
        steps: steps whose results must be exchanged again, in order, until the step of the state.
        logged_step: last step in `metrics.jsonl`, on rank 0.
    """

    loaded: LoadedCheckpoint
    read_step: int
    steps: list[RecordedStep]
    logged_step: int


class EmergencyCheckpoints:
    """Emergency checkpoints of a training run, for a single rank. See `StateSource`.

    Attributes:
        read_step: last step whose result this rank has received from all ranks.
        folder: the folder in the memory of this node.
        recovery: the state from which this attempt resumed, if it was an emergency checkpoint.
        copies: schedule of copies in memory, if the other ranks lack the state of a failed rank.
    """

    def __init__(self, parts: Components, environ: Mapping[str, str], checked: Callable[[str], bool]) -> None:
        """Check whether this training run supports emergency checkpoints.

        Args:
            parts: the components of the run.
            environ: environment variables.
            checked: returns True for the keys of tensors that must be finite.
        """
        self._parts, self._state, self._context = parts, parts.state, parts.context
        self._checked = checked
        # All ranks of an attempt have the same secret. Attempts of an earlier run in the same folder differ.
        token = code(read_secret(environ), "emergency checkpoints").hex()[:8]
        self._files = f"{int(environ.get(ATTEMPT_VARIABLE, '0')):03d}-{token}"
        self._is_first_attempt = environ.get(ATTEMPT_VARIABLE) == "0"
        self._request = json.loads(environ.get(EMERGENCY_CHECKPOINT_VARIABLE, "null"))
        self.problem = self._find_problem(environ)
        if parts.settings.emergency_checkpoints:
            emergency_save.problem = self.problem
        self.copies = self._plan_copies(environ)
        self.read_step = self._first_step = 0
        self.recovery: Recovery | None = None
        self._record: RankRecord | None = None
        self._exchange: RecordExchange | None = None
        self._has_old_files, self._is_loaded, self._recorded_buffers = True, False, False
        self._trained_versions = 0
        if parts.log.run is not None:
            # One level, because a parent could be removed by another job while this job creates the folder.
            self.folder = _SHARED_MEMORY / f"{tier_folder(Path(), parts.log.run.checkpoints).name}{_SUFFIX}"
        self._parameters = list(parts.module.parameters())
        updated = {id(each) for optimizer in self._state.optimizers for each in parameters_of(optimizer)}
        #: Their changes, such as those of a moving average, are not updates.
        self._frozen = [p for p in self._parameters if id(p) not in updated or not p.requires_grad]
        self._first_hash = self._frozen_hash = 0
        kept = parts.module.state_dict(keep_vars=True).keys()
        buffers = {name: buffer for name, buffer in parts.module.named_buffers() if name in kept}
        self._buffer_names, self._buffers = list(buffers), list(buffers.values())
        self._first_buffers: list[torch.Tensor] = []
        self._buffer_versions = self._recorded_versions = self._num_values = 0
        self._buffers_change = False

    def _plan_copies(self, environ: Mapping[str, str]) -> CopySchedule | None:
        wanted = self._parts.settings.emergency_checkpoints
        if self.problem is None or not wanted or not self._can_recover(environ):
            return None
        if self._parts.settings.on_bad_loss == "rollback":
            emergency_save.problem = f"{self.problem}, and on_bad_loss='rollback' allows no copies in memory"
            return None  # a rollback cannot load local checkpoints
        algorithm = self._parts.strategy.algorithm
        if algorithm is not None and not algorithm.shares_gradients:
            name = type(algorithm).__name__  # a copy would synchronize the ranks
            emergency_save.problem = f"{self.problem}, and algorithm {name} allows no copies in memory"
            return None
        emergency_save.problem = f"{self.problem}. The next attempt loads the newest copy in memory"
        return CopySchedule(None if wanted is True else wanted)

    def _can_recover(self, environ: Mapping[str, str]) -> bool:
        is_rank = self._parts.log.run is not None and emergency_save.is_available
        return is_rank and VERIFY_STEPS_VARIABLE not in environ

    def _find_problem(self, environ: Mapping[str, str]) -> str | None:
        """Return the reason why this training has no emergency checkpoints, or None."""
        parts, module = self._parts, self._parts.module
        strategy, state = parts.strategy, parts.state
        if not self._can_recover(environ):
            return "hpctrain did not start this process as a rank"
        if not parts.settings.emergency_checkpoints:
            return "emergency_checkpoints is False"
        if not (self._context.is_distributed and strategy.has_equal_replicas and strategy.has_complete_state):
            return f"with strategy {parts.settings.strategy!r}, no other rank has the state of a failed rank"
        algorithm = strategy.algorithm
        assert algorithm is not None
        if type(algorithm).state_dict is not Algorithm.state_dict or algorithm.keeps_gradients:
            return f"algorithm {type(algorithm).__name__} has a separate state on each rank"
        if is_manual(module):
            return f"{type(module).__name__} uses manual optimization"
        if takes_optimizer_idx(module):
            return f"{type(module).__name__} updates its optimizers one after the other (optimizer_idx)"
        if self._context.device.type != "cpu":
            return "surviving ranks cannot save their states on GPUs"
        if state.determinism is not None or state.loss_guard.policy == "skip":
            return "elastic_determinism and on_bad_loss='skip' are not supported"
        if parts.source.has_position:
            return "the training data is a stream, or has a custom sampler"
        if lightning_base(module) is not None:
            return f"{type(module).__name__} is a LightningModule"
        if type(module).on_save_checkpoint is not Module.on_save_checkpoint:
            return f"{type(module).__name__} defines on_save_checkpoint"
        if any(type(each).get_extra_state is not nn.Module.get_extra_state for each in module.modules()):
            return f"{type(module).__name__} defines get_extra_state"
        return None

    def copy_folder(self, local_checkpoints: Path | None) -> Path | None:
        """Return the folder for copies, by default in memory; `local_checkpoints` if there are no copies.

        All ranks must call this.
        """
        base = local_checkpoints if self.copies is None else local_checkpoints or _SHARED_MEMORY
        if base is None:
            return None
        assert self._parts.log.run is not None
        folder = tier_folder(base, self._parts.log.run.checkpoints)
        if self._is_first_attempt:
            # A deleted run in the same run folder may have left checkpoints on this node.
            if self._context.ranks.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            self._context.all_gather(None)
        with suppress(OSError):  # the local tier reports the reason
            if self.copies is not None and base.is_dir():
                self._make_folder(folder)
        return base

    def arm(self) -> None:
        """Allow emergency checkpoints of the current state."""
        if self.problem is not None:
            return
        if self._exchange is None and self._context.ranks.num_nodes > 1:
            self._exchange = RecordExchange(self._context)
        if self._record is None:
            try:
                self._make_folder(self.folder)
                tensors = self._buffers if self._context.ranks.is_main else []
                self._record = RankRecord(self._record_path(self._context.ranks.rank, self._files), tensors)
                if self._exchange is not None:
                    self._exchange.open(self._copy_path(self._exchange.source, self._files))
            except (OSError, CheckpointError) as error:
                self._disarm(str(error))
                return
        # After a rollback, the steps are trained again. Copies of their results are replaced.
        self._record.clear()
        self.read_step = self._first_step = self._state.step
        self._first_buffers = [buffer.clone() for buffer in self._buffers]
        self._buffer_versions = _sum_versions(self._buffers)
        self._trained_versions = _sum_versions(self._parameters)
        try:
            self._first_hash, self._frozen_hash = _hash(self._parameters), _hash(self._frozen)
        except (RuntimeError, TypeError) as error:  # such as tensors without memory
            self._disarm(f"the parameters cannot be read: {error}")
            return
        emergency_save.arm(self)

    def _disarm(self, problem: str) -> None:
        self.problem = emergency_save.problem = problem
        self._remove_files()

    def _remove_files(self) -> None:
        emergency_save.disarm()
        if self._record is not None:
            self._record.remove()
            self._record = None
        if self._exchange is not None:
            self._exchange.close()
        _remove_unused(self.folder, f"record-{self._files}-*")

    def record_result(self, rank_batch: RankBatch, sums: MetricAccumulator) -> None:
        """Record this rank's result of a step, before other ranks can complete the step."""
        self._write_record(rank_batch, sums)
        if self._exchange is not None:
            self._exchange.begin(None if self._record is None else self._record.read_slot(rank_batch.step))

    def _write_record(self, rank_batch: RankBatch, sums: MetricAccumulator) -> None:
        if self._record is None:
            return
        if self._state.step == self._first_step and (change := self._find_change()):
            self._disarm(change)
            return
        self._recorded_versions = _sum_versions(self._buffers)
        self._buffers_change |= self._recorded_versions != self._buffer_versions
        result = {
            "epoch": rank_batch.epoch,
            "values": {name: float(value) for name, value in sums.values.items()},
        }
        if self._parts.callbacks.ending is not None:
            result["end"] = self._parts.callbacks.ending
        self._record.write(rank_batch.step, result, with_tensors=self._buffers_change)
        self._num_values = len(sums.values)

    def on_step_trained(self, rank_batch: RankBatch, sums: MetricAccumulator) -> None:
        """Mark the state as complete after a step."""
        self._complete_state(rank_batch, sums)
        if self._exchange is not None:
            self._exchange.end()

    def _complete_state(self, rank_batch: RankBatch, sums: MetricAccumulator) -> None:
        if self._record is None:
            return
        if self._num_values and _sum_versions(self._buffers) != self._recorded_versions:
            self._disarm("the module changes its buffers after the forward passes of a step")
            return
        self._trained_versions = _sum_versions(self._parameters)
        if len(sums.values) != self._num_values:  # such as the norm of the gradients
            self.record_result(rank_batch, sums)
        self._num_values = 0
        emergency_save.end_change()
        self._remove_old_files()

    def close(self, error: type[BaseException] | None) -> None:
        """End the emergency checkpoints; keep the record after an error, because other ranks may need it."""
        # A recovered training may have no further step.
        if self._record is None and self.recovery is None:
            return
        if error is None or issubclass(error, SystemExit):
            self._remove_files()

    def describe(self) -> dict[str, Any]:
        """See `StateSource`."""
        state = self._state
        if self.problem is not None or state.step == 0:
            return {"why": self.problem or "training has not completed a step"}
        if self._parts.callbacks.ending is not None:
            return {"why": "a callback requested the end of training"}  # not part of the state
        if change := self._find_change():
            return {"why": change}
        trained = state.step > self._first_step
        changed = trained and not all(map(torch.equal, self._buffers, self._first_buffers))
        found = {"step": state.step, "read": self.read_step, "trained": trained, "buffers_change": changed}
        return {**found, "files": self._files}

    def _find_change(self) -> str | None:
        """Describe a change of parameters between two updates, possibly through `data`, if one is found."""
        is_first = self._state.step == self._first_step
        if (
            _sum_versions(self._parameters) != self._trained_versions
            or (is_first and _hash(self._parameters) != self._first_hash)
            or _hash(self._frozen) != self._frozen_hash
        ):
            return "the parameters were changed between two optimizer steps"
        return None

    def save(self) -> dict[str, Any]:
        """See `StateSource`.

        Raises:
            CheckpointError: the memory is not sufficient, or the state was changed meanwhile.
        """
        state, tree = self._state, self._state.tree()
        needed, free = _count_bytes(tree), shutil.disk_usage(self.folder).free
        if needed > free // 2:  # other programs also need this memory
            raise CheckpointError(
                f"the state needs {needed} bytes, but only {free // 2} of the {free} free bytes in "
                f"{self.folder} may be used"
            )
        if state.step == self._first_step:
            # No result was recorded, and the next step may have changed the buffers.
            tree["module"].update(zip(self._buffer_names, self._first_buffers, strict=True))
        folder = self._state_folder(self._files)
        try:
            store = CheckpointStore(folder, checked=self._checked)
            saved = store.save(state.step, tree, {}, verified_step=state.verified_step)
            store.close()
            if change := self._find_change():
                raise CheckpointError(change)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return {"bytes": saved.total_bytes, "path": str(saved.path)}

    def load(self, limit: int | None) -> Recovery | None:
        """Load the emergency checkpoint of the previous attempt. All ranks must call this.

        Args:
            limit: the last verified step, if later states may be wrong.

        Returns:
            None if there is no emergency checkpoint, if it is not usable, or if a checkpoint in the run
            folder is as new.
        """
        run, self.recovery = self._parts.log.run, None
        request, self._is_loaded = None if self._is_loaded else self._request, True
        if run is not None and (self.problem is None or self.copies) and self._context.ranks.local_rank == 0:
            _remove_abandoned(self.folder.parent, run)
        if request is None or run is None:
            if self.problem is None and self._has_private_folder():
                self._remove_old_files()  # they use memory
            return None
        if any(self._context.all_gather(self.problem is not None or not self._has_private_folder())):
            return None
        step, is_main = request["step"], self._context.ranks.is_main
        own = (_newest_checkpoint(run), _newest_logged_step(run)) if is_main else None
        newest, logged = self._context.broadcast_from_main(own)
        if newest >= step or (limit is not None and limit < step):
            return None
        # An attempt that had not trained a step has no records.
        first = min(request["read"], logged, step - 1) + 1 if request["trained"] else step + 1
        every = self._parts.settings.log_every
        needed = [each for each in range(first, step + 1) if each > request["read"] or each % every == 0]
        if request["trained"] and step not in needed:
            needed.append(step)
        if self._context.ranks.local_rank == 0:
            self._restore_kept_files(run)
        recorded = self._gather_records(request, needed)
        if isinstance(recorded, str):
            self._report(step, recorded)
            return None
        loaded = self._load_state(step)
        if loaded is None:
            self._report(step, "no node still has this checkpoint")
            return None
        self.recovery = Recovery(loaded, request["read"], recorded, logged)
        return self.recovery

    def _has_private_folder(self) -> bool:
        """Return true if no other user could write the folder of this node."""
        try:
            self._make_folder(self.folder)
        except OSError:
            return False
        return True

    def _restore_kept_files(self, run: RunDir) -> None:
        """Copy the files of a requeued run from its folder to the memory of this node.

        Only the node of rank 0 needs the state, which rank 0 sends to the others.
        """
        for kept in run.emergency.glob("*/*"):
            with suppress(OSError):  # incomplete files are not used
                if kept.is_file():
                    shutil.copyfile(kept, self.folder / kept.name)
                elif self._context.ranks.is_main:
                    shutil.copytree(kept, self.folder / kept.name, dirs_exist_ok=True)

    def _make_folder(self, folder: Path) -> None:
        make_private_folder(folder)
        assert self._parts.log.run is not None
        with suppress(FileExistsError):
            (folder / _RUN_LINK).symlink_to(self._parts.log.run.path.resolve())

    def restore_buffers(self, step: int) -> None:
        """Restore rank 0's buffers after the step, if they change. All ranks must call this."""
        if not (self._request["buffers_change"] or self._recorded_buffers):
            return
        if self._context.ranks.is_main:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, read_tensors(self._record_path(0), step, self._buffers))
        broadcast_buffers(self._parts.module)

    def _gather_records(self, request: Mapping[str, Any], steps: list[int]) -> list[RecordedStep] | str:
        """Return this rank's share of the results of the failed attempt, or the reason if some are lost."""
        own: list[dict[int, dict[int, Any]]] = [{}, {}]
        if self._context.ranks.local_rank == 0:
            for rank in range(request["world_size"]):
                for found, path in zip(own, (self._copy_path(rank), self._record_path(rank)), strict=True):
                    results = read_record(path)
                    found[rank] = {step: results[step] for step in steps if step in results}
        gathered = self._context.all_gather(own, "the results of the failed attempt")
        records: dict[int, dict[int, Any]] = {}
        for found in (*(copies for copies, _ in gathered), *(originals for _, originals in gathered)):
            for rank, results in found.items():
                records.setdefault(rank, {}).update(results)
        for rank in range(request["world_size"]) if steps else ():
            if missing := [step for step in steps if step not in records.get(rank, {})]:
                return f"the result of rank {rank} in step {missing[0]} is lost"
        if not steps:
            return []
        last = steps[-1]
        self._recorded_buffers = "tensors" in records[0][last]
        # Rank 0 must read the buffers itself, and a copy has no buffers.
        if last not in gathered[0][1].get(0, {}):
            if request["buffers_change"] or self._recorded_buffers:
                return "the buffers of rank 0 are lost"
        elif request["buffers_change"] and not self._recorded_buffers:
            return "the buffers of rank 0 were not recorded"
        if reason := next((each[last]["end"] for each in records.values() if "end" in each[last]), None):
            self._parts.callbacks.end(reason)
        ranks = self._context.ranks
        own_ranks = range(ranks.rank, request["world_size"], ranks.world_size)
        return [
            _join(
                step, [records[rank][step] for rank in own_ranks], [each[step] for each in records.values()]
            )
            for step in steps
        ]

    def _load_state(self, step: int) -> LoadedCheckpoint | None:
        """Load the state from the memory of this node; without it, receive it from another rank."""
        folder = self._state_folder(self._request["files"])
        path, loaded = folder / checkpoint_folder_name(step), None
        with suppress(CheckpointError):
            verified = VerifiedCheckpoint(path, read_verified(path))
            loaded = load(RankCoordinator(None, 0.0), verified, None)
        holders = self._context.all_gather(loaded is not None, "the ranks with the state")
        if not any(holders):
            return None
        if not all(holders):
            src = holders.index(True)
            content = None if loaded is None else (loaded.state, loaded.verified_step)
            state, verified_step = self._context.broadcast(content, src, "the state")
            loaded = loaded or LoadedCheckpoint(step, path, state, None, verified_step)
        return loaded

    def _state_folder(self, files: str) -> Path:
        return self.folder / f"state-{files}"

    def _record_path(self, rank: int, files: str | None = None) -> Path:
        """Return the record of a rank, by default in the failed attempt."""
        return self.folder / f"record-{files or self._request['files']}-{rank:05d}"

    def _copy_path(self, rank: int, files: str | None = None) -> Path:
        """Return the copy of the record of a rank on another node, by default in the failed attempt."""
        return self._record_path(rank, files).with_name(f"copy-{files or self._request['files']}-{rank:05d}")

    def _remove_old_files(self) -> None:
        """Remove the emergency checkpoint and the records of earlier attempts from this node."""
        if self._has_old_files and self._context.ranks.local_rank == 0:
            for path in self.folder.glob("*-*"):
                if f"-{self._files}-" not in path.name:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            if self._context.ranks.is_main and self._parts.log.run is not None:
                shutil.rmtree(self._parts.log.run.emergency, ignore_errors=True)
        self._has_old_files = False

    def _report(self, step: int, reason: str) -> None:
        self._parts.progress.print_message(
            f"hpctrain: the emergency checkpoint of step {step} is not used, because {reason}"
        )


def _newest_checkpoint(run: RunDir) -> int:
    return max(list_checkpoint_steps(run.checkpoints), default=0)


def _newest_logged_step(run: RunDir) -> int:
    record = next(read_last_records(run.metrics, is_metrics), {})
    return int(record.get("step", 0))


def _join(step: int, shares: list[dict[str, Any]], every: list[dict[str, Any]]) -> RecordedStep:
    """Return the sum of the results of some ranks; zeros if there are none.

    Values that are known only after the exchange of gradients are equal on all ranks. A rank that has not
    completed the step lacks them.
    """
    sums, common = MetricAccumulator(), dict[str, float]()
    for each in every:
        common |= each["values"]
    sums.values = {
        name: sum((each["values"].get(name, value) for each in shares), 0.0) for name, value in common.items()
    }
    return RecordedStep(step, every[0]["epoch"], sums)


def _remove_unused(folder: Path, files: str) -> None:
    """Remove the folder if no rank on this node still has a file in it."""
    with suppress(FileNotFoundError):  # another rank removes the folder at the same time
        if not any(folder.glob(files)):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(memory: Path, own: RunDir) -> None:
    """Remove this user's folders of runs that were killed and have not used this node since."""
    for folder in memory.glob("hpctrain-*"):
        with suppress(OSError):
            run = RunDir((folder / _RUN_LINK).readlink())
            if run.path == own.path.resolve() or folder.lstat().st_uid != os.geteuid():
                continue
            held = newest_lease(run)
            # A container may not have the folder of the runs.
            is_deleted = run.path.parent.exists() and not run.path.exists()
            # Local runs have a lock, and no lease. A job on a full disk has neither.
            has_ended = is_deleted or (run.lock.exists() and not is_locked(run.lock))
            if has_ended if held is None else not counts_as_alive(held, RunState.UNKNOWN):
                shutil.rmtree(folder)


def _hash(tensors: list[Any]) -> int:
    """Return a hash of the content of tensors."""
    content = xxhash.xxh3_64()
    for tensor in tensors:
        content.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.intdigest()


def _count_bytes(tree: Any) -> int:
    """Return the size of the tensors in nested containers."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, Mapping):
        return sum(map(_count_bytes, tree.values()))
    return sum(map(_count_bytes, tree)) if isinstance(tree, (list, tuple)) else 0


def _sum_versions(tensors: list[Any]) -> int:
    """Return a number that changes if a tensor is changed in place."""
    return sum(tensor._version for tensor in tensors)
