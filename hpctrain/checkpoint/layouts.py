"""What lies where in the files of all ranks: each tells rank 0 once, and again when that has changed."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.checkpoint.dcp_format import Stored, stored, tables
from hpctrain.checkpoint.image import Image
from hpctrain.checkpoint.shares import Piece


class Layouts:
    """The tables of a checkpoint, made anew only where something has changed.

    For each save: `news` on every rank, `tables` on rank 0 with all news, and `arrived` once all is well.
    """

    def __init__(self) -> None:
        self._told: tuple[Piece, ...] | None = None
        self._of_ranks: dict[int, list[Stored]] = {}
        self._tables: dict[str, bytes] = {}

    def news(self, image: Image, rank: int) -> list[Stored] | None:
        """What rank 0 has to hear about this rank's file; None where it knows."""
        is_known = self._told == image.pieces
        # Where the save fails, rank 0 may have heard it or not.
        self._told = None
        return None if is_known else stored(image, rank)

    def arrived(self, image: Image) -> None:
        """Rank 0 has heard of this rank's file."""
        self._told = image.pieces

    def tables(self, news: Sequence[list[Stored] | None]) -> dict[str, bytes]:
        """The tables, by the names of their files.

        Args:
            news: what each rank told, by rank.
        """
        changed = {rank: layout for rank, layout in enumerate(news) if layout is not None}
        if changed:
            self._of_ranks.update(changed)
            self._tables = tables(item for rank in sorted(self._of_ranks) for item in self._of_ranks[rank])
        return self._tables
