"""Per-sample randomness, independent of the process that fetches the sample.

While a sample is fetched, Python's, NumPy's and torch's generators are seeded by (seed, epoch, index). Random
draws of a data set then depend neither on the number of data workers or ranks nor on where a run stopped. A
rank that fetches samples itself gets its own generators back afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from hpctrain.errors import UserError
from hpctrain.training.base.rng import derive_seed

if TYPE_CHECKING:
    import numpy

GeneratorKind = Literal["torch", "numpy", "python"]

#: Numbers that describe what a process fetches: epoch, index, second index; -1 for none.
PROGRESS_FIELDS = 3


class SampleSeeds:
    """Source of the random generators of a data set's samples."""

    def __init__(self, seed: int, purpose: str, *, seed_globals: bool = True) -> None:
        """Set up the seeds of a data set.

        Args:
            seed: seed of the training.
            purpose: name that separates data sets, such as training and validation.
            seed_globals: True to seed the global generators, too; takes some microseconds per sample.
        """
        self._seed, self._purpose, self._seed_globals = seed, purpose, seed_globals
        self._stem = (-1, b"")

    def enter(self, epoch: int, *index: int) -> None:
        """Begin to fetch a sample: `index` is its index, or its shard and number in the shard."""
        if self._stem[0] != epoch:
            key = derive_seed(self._seed, "sample", self._purpose, epoch).to_bytes(8, "little")
            self._stem = (epoch, key)
        _now.sample = sample = _Sample(self._stem[1], index)
        if _now.board is not None:
            _now.board[:] = [epoch, *index, -1][:PROGRESS_FIELDS]
        if self._seed_globals:
            seed = sample.seed("global")
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed & 0xFFFFFFFF)

    def enter_batch(self, epoch: int, indices: list[int]) -> None:
        """Begin to fetch several samples at once; `sample_generator` then needs the index of one of them.

        The global generators are seeded for the first one.
        """
        self.enter(epoch, *indices[:1])
        if _now.sample is not None and len(indices) > 1:
            _now.sample.among = frozenset(indices)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Restore this process's own generators when the block ends."""
        own = _own_generators() if self._seed_globals else None
        try:
            yield
        finally:
            _now.sample = None
            if own is not None:
                _restore_generators(own)


@dataclass
class _Sample:
    """Sample that is being fetched."""

    key: bytes
    index: tuple[int, ...]
    among: frozenset[int] | None = None

    def seed(self, purpose: str, index: tuple[int, ...] | None = None) -> int:
        """Return a seed in [0, 2^63)."""
        text = f"{purpose}/{self.index if index is None else index}".encode()
        return int.from_bytes(hashlib.blake2b(text, key=self.key, digest_size=8).digest(), "little") >> 1


@dataclass
class _FetchState:
    """Fetching state of this process."""

    sample: _Sample | None = None
    board: MutableSequence[int] | None = None
    """Shared array for a data worker's progress: `PROGRESS_FIELDS` numbers."""


_now = _FetchState()


def write_progress_to(board: MutableSequence[int]) -> None:
    """Write this process's fetching progress to `board`, for the rank to read."""
    _now.board = board


@overload
def sample_generator(kind: Literal["torch"] = "torch", *, index: int | None = None) -> torch.Generator: ...
@overload
def sample_generator(kind: Literal["python"], *, index: int | None = None) -> random.Random: ...
@overload
def sample_generator(kind: Literal["numpy"], *, index: int | None = None) -> numpy.random.Generator: ...
def sample_generator(kind: GeneratorKind = "torch", *, index: int | None = None) -> Any:
    """Return a new random generator for the sample that is being fetched, seeded by (seed, epoch, index).

    Call it in a data set's `__getitem__` or in a transform called from there. Its numbers are the same in any
    data worker, on any rank, for any number of ranks, and after a resume. Two calls for one sample return
    generators in the same state. Outside of training the seed comes from this process's own generator.

    Args:
        kind: `torch` (on the CPU), `numpy`, or `python` for a `random.Random`.
        index: the sample, in a data set's `__getitems__`, which fetches several at once.

    Raises:
        UserError: `kind` is unknown, or several samples are being fetched and `index` is none of them.
    """
    sample = _now.sample
    if sample is None:
        seed = int(torch.randint(2**62, ()).item())
    elif sample.among is None:
        seed = sample.seed(kind, (index,) if index is not None else None)
    elif index in sample.among:
        seed = sample.seed(kind, (index,))
    else:
        raise UserError(
            f"sample_generator(index={index!r}): __getitems__ is fetching {len(sample.among)} samples. "
            "Pass the index of one of them."
        )
    if kind == "torch":
        return torch.Generator().manual_seed(seed)
    if kind == "python":
        return random.Random(seed)
    if kind == "numpy":
        import numpy

        return numpy.random.default_rng(seed)
    raise UserError(f"sample_generator({kind!r}): choose from 'torch', 'numpy' and 'python'.")


def _own_generators() -> tuple[torch.Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _restore_generators(own: tuple[torch.Tensor, Any, Any]) -> None:
    torch.default_generator.set_state(own[0])
    random.setstate(own[1])
    if own[2]:
        sys.modules["numpy"].random.set_state(own[2])
