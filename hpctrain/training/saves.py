"""The saves of one training: begun, told of how they ended, waited for or given up."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.store import PATIENCE_S, CheckpointStore, Loaded, NotCopied, Saved
from hpctrain.checkpoint.tree import split_tree
from hpctrain.errors import CheckpointError, UserError
from hpctrain.rundir import RunDir
from hpctrain.training import rng
from hpctrain.training.cadence import CheckpointCadence
from hpctrain.training.progress import Progress
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.state import TrainingState

#: A save that takes longer than this is taken for stuck.
LONGEST_SAVE_S = 3600.0
#: Training waits so long for a save in flight, or so many times as long as the one before took, if that is
#: longer; then a state that is due goes unsaved.
_LONGEST_WAIT_S, _TIMES_LATEST = 60.0, 3.0
#: And so long where the one before failed.
_WAIT_IN_TROUBLE_S = 5.0


@dataclass(frozen=True)
class _InFlight:
    """A save that is being written."""

    step: int
    since: float
    stall_s: float


class Saves:
    """Writes states into a run's checkpoints, and says and records what became of each.

    One is in flight at a time, so that memory for one is enough. `begin`, `save_result`, `load` and `close`
    must be called by all ranks; so must `prepare`, for it asks the state, which may ask the other ranks.

    Attributes:
        write_s: seconds after which the latest one was in the run folder; None before there was one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainingState,
        cadence: CheckpointCadence,
        *,
        run: RunDir,
        log: RunLog,
        progress: Progress,
        settings: Settings,
        is_main: bool,
    ) -> None:
        self._store, self._state, self._cadence = store, state, cadence
        self._run, self._log, self._progress, self._settings = run, log, progress, settings
        self._is_main = is_main
        self._in_flight: _InFlight | None = None
        self._closed = False
        self._overdue: int | None = None
        self.write_s: float | None = None

    @property
    def in_flight_s(self) -> float | None:
        """For how long the save in flight has been written; None where there is none."""
        return None if self._in_flight is None else time.monotonic() - self._in_flight.since

    def check(self) -> None:
        """See that the state can be kept: better now than at the first save, hours from here.

        Raises:
            CheckpointError: it holds something else than tensors and plain values; the message says where.
        """
        split_tree(self._state.tree(), "state")

    def prepare(self) -> None:
        """Allocate, in the background, the memory into which states are copied."""
        with suppress(CheckpointError):  # `begin` meets it again, and tells of it.
            self._store.prepare(self._state.tree(), rng.capture())

    def load(self) -> tuple[Loaded | None, list[str]]:
        """See `CheckpointStore.load_newest`."""
        return self._store.load_newest(self._state.like())

    def may_begin(self) -> bool:
        """Whether another save can begin; waits for the one in flight, within a limit. On rank 0 alone.

        A disk that hangs must not keep the run from training.
        """
        if self._cadence.rests:
            return False
        if self._in_flight is None:
            return True
        write_s = self._cadence.write_s
        limit_s = PATIENCE_S if write_s is None else max(_LONGEST_WAIT_S, _TIMES_LATEST * write_s)
        if self._cadence.is_troubled:
            limit_s = _WAIT_IN_TROUBLE_S
        if self._store.finish(max(0.0, self._in_flight.since + limit_s - time.monotonic())):
            return True
        if self._overdue != self._in_flight.step:
            self._overdue = self._in_flight.step
            cause = (
                f"The checkpoint of step {self._overdue} is not done after {self.in_flight_s:.0f} s: "
                f"the state after step {self._state.step} is not saved"
            )
            self._log.event("failure", cause=f"{cause}.")
            self._progress.say(f"hpctrain: {cause}, nor are those after it until it is. Training goes on.")
        return False

    def begin(self) -> None:
        """Copy the state as it is; it is written from now on.

        Raises:
            UserError: the metric by which the best checkpoints are kept is not there.
        """
        begun = time.monotonic()
        self._store.finish(LONGEST_SAVE_S)
        self.settle()
        self._look_for_the_others()
        self._store.begin(self._state.step, self._state.tree(), rng.capture(), score=self._score())
        stall_s = time.monotonic() - begun
        self._in_flight = _InFlight(self._state.step, begun, stall_s)
        self._cadence.begun(stall_s)

    def save_result(self) -> None:
        """Save the state of the last step, and wait for it.

        Raises:
            CheckpointError: on all ranks alike: it could not be saved.
            UserError: the metric by which the best checkpoints are kept is not there.
        """
        self._store.finish(LONGEST_SAVE_S)
        self.settle()
        self._look_for_the_others()
        try:
            saved = self._store.save(self._state.step, self._state.tree(), rng.capture(), score=self._score())
        except CheckpointError as error:
            self._note_failure(error, "")
            raise
        self._note_saved(saved)

    def add_score(self) -> None:
        """Let this step's checkpoint take part among the best, where it was saved before it was validated.

        Raises:
            UserError: the metric by which the best checkpoints are kept is not there.
        """
        score = self._score()
        if score is None or not self._is_main:
            return
        try:
            self._store.add_score(self._state.step, score)
        except (CheckpointError, OSError) as error:
            self._progress.say(
                f"hpctrain: the checkpoint of step {self._state.step} is not among the best: {error}"
            )

    def finish(self, timeout_s: float = LONGEST_SAVE_S) -> bool:
        """Wait for the save in flight, and say whether there is none any more."""
        return self._store.finish(max(0.0, timeout_s))

    def abandon(self) -> None:
        """Give up the save in flight, unless it is all but committed. Does not wait."""
        if not self._closed:
            self._store.abandon()

    def settle(self) -> list[Saved]:
        """Record and say how the saves ended that did so meanwhile; those that did so well are returned."""
        good = []
        for end in self._store.finished():
            if isinstance(end, CheckpointError):
                self._note_failure(end, " Training goes on; the checkpoints before it stand.")
            else:
                self._note_saved(end)
                good.append(end)
        return good

    def close(self, timeout_s: float | None = None) -> list[Saved]:
        """End what goes on in the background, and return what was saved meanwhile."""
        if self._closed:
            return []
        self._closed = True
        # The next start may be on other nodes, where nobody would remove what lies on these.
        for note in self._store.close(clean=True, timeout_s=timeout_s):
            self._progress.say(f"hpctrain: {note}")
        return self.settle()

    def is_shared(self, saved: Saved) -> bool:
        """Whether it lies in the run folder, and not only in a fast folder of this node."""
        return saved.path.parent == self._run.checkpoints

    def _look_for_the_others(self) -> None:
        """Say so where the folder that the earlier checkpoints were in is not there any more."""
        folder = self._run.checkpoints
        if not self._is_main or self.write_s is None:
            return
        try:
            os.stat(folder)
        except FileNotFoundError:
            cause = f"{folder} has vanished, with the checkpoints in it. It is made anew."
            self._log.event("failure", cause=cause)
            self._progress.say(f"hpctrain: {cause}")
        except OSError:
            return  # The save says what is wrong.

    def _note_saved(self, saved: Saved) -> None:
        for note in saved.notes:
            self._progress.say(f"hpctrain: {note}")
        fields: dict[str, Any] = {}
        if self._in_flight is not None and self._in_flight.step == saved.step:
            fields["stall_s"] = self._in_flight.stall_s
            self._in_flight = None
            self._cadence.saved(saved.seconds)
        if self.is_shared(saved):
            self.write_s = saved.seconds
        if saved.score is not None:
            fields |= {
                "score": saved.score,
                "metric": self._settings.best_metric,
                "mode": self._settings.best_mode,
            }
        self._log.event(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            tier="shared" if self.is_shared(saved) else "local",
            bytes=saved.total_bytes,
            seconds=saved.seconds,
            **fields,
        )

    def _note_failure(self, error: CheckpointError, comfort: str) -> None:
        # What was not copied may be an earlier one than that which is being written.
        if self._in_flight is None or not isinstance(error, NotCopied):
            self._in_flight = None
            self._cadence.failed()
        self._log.event("failure", cause=str(error))
        self._progress.say(f"hpctrain: {str(error).rstrip('.')}.{comfort}")

    def _score(self) -> float | None:
        """How good the state is; None where the best are not kept, or it was not measured after this step."""
        settings, state = self._settings, self._state
        if not settings.keep_best:
            return None
        if settings.best_metric not in state.latest and state.validated_step == state.step:
            raise UserError(
                f"best_metric is {settings.best_metric!r}, by which keep_best={settings.keep_best} is to go, "
                f"but step {state.step} has {', '.join(map(repr, sorted(state.latest)))}. "
                "Give one of these as best_metric, or let validation_step return it."
            )
        return state.latest.get(settings.best_metric)
