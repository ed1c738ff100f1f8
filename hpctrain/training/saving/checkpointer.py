"""Save and load checkpoints in your own training loop."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.checkpoint.format.state_tree import split_tree
from hpctrain.checkpoint.io.retention import KEEP_ALL, Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave, LoadedCheckpoint
from hpctrain.cluster import detect
from hpctrain.errors import EXIT_CONTINUE, CheckpointError, UserError
from hpctrain.record_types import RankPhase
from hpctrain.rundir import find_output
from hpctrain.runtime.distributed_context import init_distributed
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.resumed_values import configured_values, ignored_values
from hpctrain.runtime.unfinished_training import pending_saves
from hpctrain.training.base import rng
from hpctrain.training.observe.environment_info import collect_platform, hash_code
from hpctrain.training.observe.run_writer import RunWriter
from hpctrain.training.saving.checkpoint_schedule import VerificationSteps
from hpctrain.training.saving.training_checkpoints import MAX_SAVE_S, is_trained, refuse_restart_from_zero
from hpctrain.training.saving.unsaved_objects import remark_on_unsaved
from hpctrain.training.strategies.ddp import regroup_buckets
from hpctrain.training.strategies.strategy import broadcast_tensors
from hpctrain.training.training_state import Stateful, optimizer_parameters

#: Key of the values of optimizers and schedulers that the script of the first attempt has set.
_CONFIGURED = "hpctrain configured"


class Checkpointer:
    """Checkpoints for your own loop, with all passed objects and the random state of each rank.

    A checkpoint is written by all ranks and committed by a rename, so that a kill never leaves an incomplete
    checkpoint. All methods are collective. Without a run folder, nothing is saved or loaded.
    """

    def __init__(
        self,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        **objects: Stateful | dict[str, Any],
    ) -> None:
        """Open the checkpoints of the run. Forms the process group if the script has not done so.

        Args:
            run_dir: output folder; None uses the run folder of the job.
            keep_last: number of newest checkpoints to keep.
            keep_every: also keep checkpoints whose step is a multiple of this number; None keeps no others.
            objects: everything with `state_dict` and `load_state_dict`: models, optimizers, schedules,
                samplers, scalers; and dicts of your own values, which `load` updates in place. The wrapper
                `DistributedDataParallel` is not saved.

        Raises:
            UserError: an object has no state, or an option is out of range.
            RendezvousError: the ranks did not form a process group.
        """
        stateful = {
            name: _PlainValues(value) if isinstance(value, dict) else value for name, value in objects.items()
        }
        for name, value in stateful.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UserError(
                    f"Checkpointer received {name}={type(value).__name__}(…), which lacks state_dict() or "
                    "load_state_dict(). Remove the object, or add the missing methods."
                )
        self._replicas = [value for value in stateful.values() if isinstance(value, DistributedDataParallel)]
        self._objects = {
            name: value.module if isinstance(value, DistributedDataParallel) else value
            for name, value in stateful.items()
        }
        self._optimizers, self._schedulers = (
            [value for value in self._objects.values() if isinstance(value, kind)]
            for kind in (torch.optim.Optimizer, LRScheduler)
        )
        self._configured: dict[str, Any] = {}
        self._run = find_output(run_dir, os.environ)
        self._context = init_distributed(detect(os.environ), os.environ)
        self._store: CheckpointStore | None = None
        self._verification = VerificationSteps.from_env(os.environ)
        if self._run is None:
            self._print(
                "There is no run folder, so nothing is saved. Pass run_dir, or use `hpctrain submit`."
            )
            return
        self._run.check_records()
        self._log = RunWriter(self._run, self._context, os.environ, self._print)
        if self._context.ranks.is_main:
            self._log.write_environment({**collect_platform(self._context), "code": hash_code(os.environ)})
            self._log.write_ignored(())
        self._store = CheckpointStore(
            self._run.checkpoints,
            self._context.cpu_group,
            retention=KEEP_ALL if self._verification else Retention(last=keep_last, every=keep_every),
            records=(self._run.metrics, self._run.events),
            checked=is_trained(
                {
                    name: value if isinstance(value, nn.Module) else None
                    for name, value in self._objects.items()
                    if isinstance(value, (nn.Module, torch.optim.Optimizer))
                }
            ),
        )
        # Runs before the exit handler of the store, which aborts a save in flight.
        atexit.register(self._wait_at_exit)
        pending_saves.append(self._wait_at_exit)

    def load(self) -> int:
        """Load the newest valid checkpoint; return its step, or 0 if there is none.

        Call this once, after the objects are complete and before the first step.

        Raises:
            UserError: the checkpoint does not fit the objects, or all checkpoints are damaged.
            CheckpointError: a checkpoint cannot be read at the moment.
        """
        for replica in self._replicas:
            # Otherwise, the first step after a restart would add gradients in another order.
            regroup_buckets(replica)
        if self._store is None or self._run is None:
            return 0
        remedy = "Pass them to Checkpointer."
        if message := remark_on_unsaved([*self._objects.values(), *self._replicas], remedy):
            self._print(message)
        self._configured = configured_values(self._optimizers, self._schedulers)
        begun = time.monotonic()
        with activity.in_phase(RankPhase.LOAD):
            loaded, broken = self._store.load_newest(self._template())
        for sentence in broken:
            self._print(sentence)
        if loaded is None:
            refuse_restart_from_zero(self._context, self._run.checkpoints, broken)
            return 0
        self._restore(loaded)
        self._log.write_resumed(loaded.step, loaded.path, time.monotonic() - begun, broken)
        self._print(f"resumed after step {loaded.step} from {loaded.path}")
        return loaded.step

    def save(self, step: int) -> None:
        """Save the state after `step` steps, and wait for the commit.

        Raises:
            CheckpointError: on all ranks: the state could not be saved. Earlier checkpoints are intact.
        """
        with self._saving(step) as store:
            if store is not None:
                self._record(store.save(step, self._next_state(), rng.capture_rng_state()))

    def async_save(self, step: int) -> None:
        """Copy the state after `step` steps, and write it in the background.

        Waits for an earlier save first. A save that fails is reported, and training continues.

        Raises:
            CheckpointError: on all ranks: an object has a state that differs between ranks.
        """
        with self._saving(step) as store:
            if store is not None:
                store.async_save(step, self._next_state(), rng.capture_rng_state())

    def save_and_exit(self, step: int) -> NoReturn:
        """Save the state after `step` steps, and exit with the code that requests a continuation.

        Call this if `hpctrain.should_stop()` is true. If the save fails, earlier checkpoints are intact.

        Raises:
            SystemExit: with code 75, always.
        """
        try:
            self.save(step)
        except CheckpointError as error:
            self._print(f"{error}")
        raise SystemExit(EXIT_CONTINUE)

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        if self._store is None:
            return
        self._store.wait(MAX_SAVE_S)
        for outcome in self._store.collect_outcomes():
            if isinstance(outcome, CheckpointError):
                cause = str(outcome)
                self._log.write_event("failure", cause=cause)
                self._print(f"{cause.rstrip('.')}. Training continues; earlier checkpoints are intact.")
            else:
                self._record(outcome)

    @contextmanager
    def _saving(self, step: int) -> Iterator[CheckpointStore | None]:
        """Yield the store, unless `step` is not saved; end a verification after its last step."""
        verification = self._verification
        if self._store is None or (verification is not None and step not in verification.saved):
            yield None
            return
        with activity.in_phase(RankPhase.SAVE):
            yield self._store
        if verification is not None and step == verification.last:
            self.wait()
            assert self._run is not None
            verification.end_run(self._run, self._context)

    def _next_state(self) -> dict[str, Any]:
        """Return the state of all objects, after the save in flight; values must not differ between ranks."""
        for replica in self._replicas:
            if replica.broadcast_buffers:
                broadcast_tensors(replica.module.buffers())  # DDP does this only before the next forward pass
        state = {name: value.state_dict() for name, value in self._objects.items()}
        digests = {
            name: hashlib.sha256(json.dumps(split_tree(object_state, name)[0]).encode()).hexdigest()
            for name, object_state in state.items()
        }
        for rank, of_rank in enumerate(self._context.all_gather(digests, "the checksum of the state")):
            for name, digest in digests.items():
                if of_rank[name] != digest:
                    raise CheckpointError(
                        f"{name}.state_dict() differs between rank {rank} and rank "
                        f"{self._context.ranks.rank}, but a checkpoint stores one state for all ranks. To "
                        "save the position in the data, use a StatefulBatchSampler"
                    )
        self.wait()
        return {**state, _CONFIGURED: self._configured}

    def _template(self) -> dict[str, Any]:
        """Return the state, with parameters in place of the optimizer state; see `TrainingState.template`."""
        template: dict[str, Any] = dict.fromkeys([_CONFIGURED, *self._objects])
        for name, value in self._objects.items():
            if isinstance(value, torch.optim.Optimizer):
                template[name] = optimizer_parameters(value)
            elif isinstance(value, nn.Module):
                template[name] = value.state_dict()
        return template

    def _restore(self, loaded: LoadedCheckpoint) -> None:
        configured = loaded.state.pop(_CONFIGURED, None)
        if loaded.state.keys() != self._objects.keys():
            raise UserError(
                f"{loaded.path} contains {', '.join(sorted(loaded.state))}, but Checkpointer received "
                f"{', '.join(sorted(self._objects))}. Pass objects with the same names, or start a new "
                "run in a new folder."
            )
        for name, value in self._objects.items():
            try:
                value.load_state_dict(loaded.state[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise UserError(
                    f"{name} in {loaded.path} does not match the script: {str(error).rstrip('.')}. Restore "
                    f"the previous {name}, or start a new run in a new folder."
                ) from error
        ignored = ignored_values(self._optimizers, self._schedulers, self._configured, configured)
        self._configured = configured or self._configured
        self._log.write_ignored(ignored)
        for ignored_value in ignored:
            self._print(f"{ignored_value} To change the value in a resumed run, set it after load().")
        rng.resume_rng_state(loaded.rank_state, "rank", self._context.ranks.rank, "step", loaded.step)

    def _record(self, saved: CommittedSave) -> None:
        for note in saved.notes:
            self._print(note)
        self._log.write_checkpoint(saved.step, saved.path, saved.total_bytes, saved.seconds)

    def _print(self, message: str) -> None:
        if self._context.ranks.is_main:
            print(message if message.startswith("hpctrain: ") else f"hpctrain: {message}", flush=True)

    def _wait_at_exit(self) -> None:
        # After a crash, the other ranks may have exited.
        if getattr(sys, "last_value", None) is None:
            self.wait()


class _PlainValues:
    """A dict of the script, whose values are part of the state."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.clear()
        self._values.update(state_dict)
