"""What goes on behind a save: where it is written, what is made of its parts, and how its end is told."""

from __future__ import annotations

import json
import threading

from hpctrain.checkpoint.agreement import LostTouch, reason
from hpctrain.checkpoint.capture import Captured
from hpctrain.checkpoint.commit import Contribution, Site, commit_together
from hpctrain.checkpoint.copying import NotCopied
from hpctrain.checkpoint.dcp_format import Stored, file_name
from hpctrain.checkpoint.layouts import Layouts
from hpctrain.checkpoint.loading import STATE_NAME
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, entry_of
from hpctrain.checkpoint.parts import GivenUp, Writing, of_memory
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.saved import Save, Saved, saved_in
from hpctrain.checkpoint.tier import Tier
from hpctrain.errors import CheckpointError

#: What one rank wrote, and what it had to say of it.
_Brought = tuple[list[FileEntry], list[Stored] | None]


class Saving:
    """Writes one save after the other, in threads of the store.

    Attributes:
        tier: the second tier, if there is one; to be set before the first save.
        notes: sentences to go with the next checkpoint.
    """

    def __init__(self, site: Site, retention: Retention) -> None:
        self._site, self._retention, self._agreement = site, retention, site.agreement
        self.tier: Tier | None = None
        self.notes: list[str] = []
        self._layouts = Layouts()
        self._writing: Writing | None = None
        self._ended: list[Saved | CheckpointError] = []
        self._lock = threading.Lock()

    @property
    def hanging(self) -> Writing | None:
        """What still reads the memory of an earlier save, since its disk hangs; None as a rule."""
        return None if self._writing is None or self._writing.ended.is_set() else self._writing

    def run(self, save: Save) -> None:
        """Write and commit a save; its outcome is told to it, and by `ended`. All ranks must call this."""
        try:
            save.outcome = self._save(save)
        except CheckpointError as error:
            save.outcome = error
        except Exception as error:  # noqa: BLE001 (it is the outcome)
            save.outcome = CheckpointError(f"checkpoint of step {save.step} was not written: {reason(error)}")
        save.captured = None
        self._tell(save.outcome)

    def ended(self) -> list[Saved | CheckpointError]:
        """How saves and copies have ended since the last call. Never waits."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def forget(self, outcome: Saved | CheckpointError | None) -> None:
        """Tell no more of what whoever asked has heard of."""
        with self._lock:
            self._ended = [each for each in self._ended if each is not outcome]

    def reached_shared(self, manifest: Manifest, begun: float) -> None:
        """A checkpoint was copied from the second tier."""
        self._tell(saved_in(self._site.place, manifest, begun, 0.0, self._prune(manifest.step)))

    def failed_to_reach_shared(self, error: NotCopied) -> None:
        """A checkpoint could not be copied."""
        self._tell(error)

    def _tell(self, outcome: Saved | CheckpointError) -> None:
        with self._lock:
            self._ended.append(outcome)

    def _save(self, save: Save) -> Saved:
        self._agreement.raise_alike(save.problem, f"checkpoint of step {save.step} was not written")
        assert save.captured is not None
        notes, self.notes = self.notes, []
        if self.tier is not None and not save.direct:
            try:
                self.tier.make_room(save.captured.image.num_bytes)
                manifest = self._commit(save, save.captured, self.tier.site)
            except (LostTouch, GivenUp):
                raise
            except CheckpointError as error:
                notes.append(f"{error}; it goes to {self._site.place.folder} directly.")
            else:
                self.tier.committed(save.step, may_skip=self._retention.may_skip(save.step, save.score))
                return saved_in(self.tier.site.place, manifest, save.begun, save.stall_s, notes)
        manifest = self._commit(save, save.captured, self._site)
        notes += self._prune(save.step)
        return saved_in(self._site.place, manifest, save.begun, save.stall_s, notes)

    def _commit(self, save: Save, captured: Captured, site: Site) -> Manifest:
        image, rank = captured.image, self._agreement.rank

        def seal(everything: list[_Brought]) -> dict[str, bytes]:
            tables = self._layouts.tables([news for _, news in everything])
            files = {**tables, STATE_NAME: json.dumps(captured.plain).encode("ascii") + b"\n"}
            entries = [entry for entries, _ in everything for entry in entries]
            entries += [entry_of(name, content) for name, content in files.items()]
            size = self._agreement.world_size
            manifest = Manifest(save.step, size, save.time, save.score, tuple(entries))
            return {**files, MANIFEST_NAME: manifest.encode()}

        own = Contribution(
            [of_memory(file_name(rank), image.content)] if image.num_bytes else [],
            seal,
            remark=self._layouts.news(image, rank),
            alike=captured.alike,
            ready=captured.ready,
            give_up=save.give_up,
        )
        try:
            manifest = commit_together(site, save.step, own)
        finally:
            # What has ended must not keep memory that a larger state makes superfluous.
            self._writing = None if own.writing is None or own.writing.ended.is_set() else own.writing
        self._layouts.arrived(image)
        return manifest

    def _prune(self, newest: int) -> list[str]:
        if not self._agreement.is_main:
            return []
        pruning = self._site.hand.do(lambda: self._site.place.prune(newest, self._retention))
        pruning.wait(self._site.patience_s)
        if pruning.problem:  # the new checkpoint is there all the same
            return [f"No old checkpoint was deleted: {pruning.problem}."]
        return pruning.result or []
