"""Per-sample randomness, independent of the process that fetches the sample.

While a sample is fetched, Python's, NumPy's and torch's generators are seeded by (seed, epoch, index). Random
numbers in a data set then do not depend on the number of data workers or ranks, or on earlier stops. In a
rank that fetches samples itself, the generators are restored afterwards.
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

#: Numbers that identify the sample being fetched: epoch, index, second index; -1 for none.
PROGRESS_FIELDS = 3


class SampleSeeds:
    def __init__(self, seed: int, purpose: str, *, seed_globals: bool = True) -> None:
        self._seed, self._purpose, self._seed_globals = seed, purpose, seed_globals
        self._stem: tuple[int | None, bytes] = (None, b"")

    def enter(self, epoch: int, *index: int) -> None:
        """Start fetching a sample: `index` is its index, or its shard and number in the shard."""
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
        """Start fetching several samples together; `sample_generator` then requires the index of a sample."""
        self.enter(epoch, *indices[:1])
        if _now.sample is not None and len(indices) > 1:
            _now.sample.among = frozenset(indices)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        generators = _own_generators() if self._seed_globals else None
        try:
            yield
        finally:
            _now.sample = None
            if generators is not None:
                _restore_generators(generators)


def describe_round(number: int) -> str:
    return f"epoch {number}" if number >= 0 else f"step {-number}"


@dataclass
class _Sample:
    key: bytes
    index: tuple[int, ...]
    among: frozenset[int] | None = None

    def seed(self, purpose: str, index: tuple[int, ...] | None = None) -> int:
        text = f"{purpose}/{self.index if index is None else index}".encode()
        return int.from_bytes(hashlib.blake2b(text, key=self.key, digest_size=8).digest(), "little") >> 1


@dataclass
class _FetchState:
    sample: _Sample | None = None
    board: MutableSequence[int] | None = None
    """Shared array for a data worker's progress: `PROGRESS_FIELDS` numbers."""


_now = _FetchState()


def write_progress_to(board: MutableSequence[int]) -> None:
    _now.board = board


@overload
def sample_generator(kind: Literal["torch"] = "torch", *, index: int | None = None) -> torch.Generator: ...
@overload
def sample_generator(kind: Literal["python"], *, index: int | None = None) -> random.Random: ...
@overload
def sample_generator(kind: Literal["numpy"], *, index: int | None = None) -> numpy.random.Generator: ...
def sample_generator(kind: GeneratorKind = "torch", *, index: int | None = None) -> Any:
    """Return a new random generator for the sample being fetched, seeded by (seed, epoch, index).

    Call this in the `__getitem__` of a data set, or in a transform called from `__getitem__`. The random
    numbers are the same in any data worker, on any rank, for any number of ranks, and after a resume. Two
    calls for the same sample return generators in the same state. Outside training, the seed is drawn from
    the generator of this process.

    Args:
        kind: `torch` (on the CPU), `numpy`, or `python` for a `random.Random`.
        index: index of the sample; required in a data set's `__getitems__`, which fetches several samples at
            once.

    Raises:
        UserError: `kind` is unknown, or several samples are being fetched and `index` is not among them.
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
            f"sample_generator() received index={index!r}, which is not among the {len(sample.among)} "
            "samples that __getitems__ is fetching. Pass the index of one of these samples."
        )
    if kind == "torch":
        return torch.Generator().manual_seed(seed)
    if kind == "python":
        return random.Random(seed)
    if kind == "numpy":
        import numpy

        return numpy.random.default_rng(seed)
    raise UserError(
        f"sample_generator() received kind={kind!r}, but kind must be 'torch', 'numpy' or 'python'."
    )


def _own_generators() -> tuple[torch.Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _restore_generators(generators: tuple[torch.Tensor, Any, Any]) -> None:
    torch.default_generator.set_state(generators[0])
    random.setstate(generators[1])
    if generators[2]:
        sys.modules["numpy"].random.set_state(generators[2])
