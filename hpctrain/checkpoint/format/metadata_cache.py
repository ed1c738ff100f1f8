"""Cache of the layouts of all ranks' files; each rank sends its layout to rank 0 only when it has changed."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.checkpoint.format.dcp_format import StoredChunk, build_tables, stored_chunks
from hpctrain.checkpoint.format.staged_file import StagedFile
from hpctrain.checkpoint.format.write_plan import WriteItem


class MetadataCache:
    """The tables of a checkpoint, rebuilt only if a layout has changed.

    For each save: `news` on every rank, `tables` on rank 0 with all news, and `arrived` once the save has
    succeeded.
    """

    def __init__(self) -> None:
        self._told: tuple[WriteItem, ...] | None = None
        self._of_ranks: dict[int, list[StoredChunk]] = {}
        self._tables: dict[str, bytes] = {}

    def news(self, image: StagedFile, rank: int) -> list[StoredChunk] | None:
        """Return the layout of this rank's file for rank 0; None if rank 0 already has it."""
        is_known = self._told == image.pieces
        # If the save fails, rank 0 may or may not have received it.
        self._told = None
        return None if is_known else stored_chunks(image, rank)

    def arrived(self, image: StagedFile) -> None:
        """Record that rank 0 has received the layout of this rank's file."""
        self._told = image.pieces

    def tables(self, news: Sequence[list[StoredChunk] | None]) -> dict[str, bytes]:
        """Return the tables, by file name.

        Args:
            news: the result of `news` of each rank, by rank.
        """
        changed = {rank: layout for rank, layout in enumerate(news) if layout is not None}
        if changed:
            self._of_ranks.update(changed)
            self._tables = build_tables(
                item for rank in sorted(self._of_ranks) for item in self._of_ranks[rank]
            )
        return self._tables
