"""Randomness that belongs to a sample: the same whoever fetches it, wherever and however often.

While a sample is fetched, Python's, NumPy's and torch's generators are those of this sample, seeded by (seed,
epoch, index). What a data set draws then depends neither on the number of data workers or ranks nor on where
a run was stopped; and a rank that fetches by itself finds its own generators as they were.
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
from hpctrain.training.rng import derived_seed

if TYPE_CHECKING:
    import numpy

Kind = Literal["torch", "numpy", "python"]

#: Numbers that say what a process fetches: epoch, index, second index; -1 where there is none.
WHEREABOUTS = 3


class SampleSeeds:
    """Gives each sample of a data set its random generators."""

    def __init__(self, seed: int, purpose: str, *, seed_globals: bool = True) -> None:
        """Prepare.

        Args:
            seed: of the training.
            purpose: keeps data sets apart, such as training and validation.
            seed_globals: whether to seed the global generators, too; it takes some microseconds a sample.
        """
        self._seed, self._purpose, self._seed_globals = seed, purpose, seed_globals
        self._stem = (-1, b"")

    def enter(self, epoch: int, *index: int) -> None:
        """From now on a sample is being fetched: `index`, or a shard and the number of the sample in it."""
        if self._stem[0] != epoch:
            key = derived_seed(self._seed, "sample", self._purpose, epoch).to_bytes(8, "little")
            self._stem = (epoch, key)
        _now.sample = sample = _Sample(self._stem[1], index)
        if _now.board is not None:
            _now.board[:] = [epoch, *index, -1][:WHEREABOUTS]
        if self._seed_globals:
            seed = sample.seed("global")
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed & 0xFFFFFFFF)

    def enter_batch(self, epoch: int, indices: list[int]) -> None:
        """From now on several samples are being fetched at once; each asks for its generator by its index.

        The global generators are those of the first one.
        """
        self.enter(epoch, *indices[:1])
        if _now.sample is not None and len(indices) > 1:
            _now.sample.among = frozenset(indices)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Put this process's own generators back when the block ends."""
        own = _own_generators() if self._seed_globals else None
        try:
            yield
        finally:
            _now.sample = None
            if own is not None:
                _put_back(own)


@dataclass
class _Sample:
    """The sample that is being fetched."""

    key: bytes
    index: tuple[int, ...]
    among: frozenset[int] | None = None

    def seed(self, purpose: str, index: tuple[int, ...] | None = None) -> int:
        """A seed in [0, 2^63)."""
        text = f"{purpose}/{self.index if index is None else index}".encode()
        return int.from_bytes(hashlib.blake2b(text, key=self.key, digest_size=8).digest(), "little") >> 1


@dataclass
class _Now:
    """What this process is fetching."""

    sample: _Sample | None = None
    board: MutableSequence[int] | None = None
    """Where a data worker writes down what it is at: `WHEREABOUTS` numbers."""


_now = _Now()


def write_whereabouts_to(board: MutableSequence[int]) -> None:
    """Have this process write down what it fetches, for the rank to read."""
    _now.board = board


@overload
def sample_generator(kind: Literal["torch"] = "torch", *, index: int | None = None) -> torch.Generator: ...
@overload
def sample_generator(kind: Literal["python"], *, index: int | None = None) -> random.Random: ...
@overload
def sample_generator(kind: Literal["numpy"], *, index: int | None = None) -> numpy.random.Generator: ...
def sample_generator(kind: Kind = "torch", *, index: int | None = None) -> Any:
    """A new random generator for the sample that is being fetched, seeded by (seed, epoch, index).

    Call it in a data set's `__getitem__` or in a transform that this calls: what is drawn from it is the same
    in any worker, on any rank of any number of ranks, and after a stop. Two calls for one sample give two
    generators in the same state. Outside of a training the seed comes from this process's own generator.

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
            f"sample_generator(index={index!r}) in a __getitems__ of {len(sample.among)} samples: "
            "give the index of one of them."
        )
    if kind == "torch":
        return torch.Generator().manual_seed(seed)
    if kind == "python":
        return random.Random(seed)
    if kind == "numpy":
        import numpy

        return numpy.random.default_rng(seed)
    raise UserError(f"sample_generator({kind!r}): known are 'torch', 'numpy' and 'python'.")


def _own_generators() -> tuple[torch.Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _put_back(own: tuple[torch.Tensor, Any, Any]) -> None:
    torch.default_generator.set_state(own[0])
    random.setstate(own[1])
    if own[2]:
        sys.modules["numpy"].random.set_state(own[2])
