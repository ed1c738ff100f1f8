"""Order the samples of a map-style data set.

The order of an epoch is a keyed permutation, a pure function of (seed, epoch, position), independent of the
number of ranks. It is computed, not stored, so a checkpoint contains only a position.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

#: Number of rounds of the network. Six rounds pass the uniformity tests at any size; the others are a margin.
_ROUNDS = 10
#: Number of positions computed together: the cost of a tensor operation is the same up to some thousand.
_CHUNK = 16384


class SampleOrder:
    """Pseudo-random permutation of [0, num_samples) for each epoch, with O(1) access to any position.

    A Feistel network over a grid of `a × b ≥ num_samples` cells with modular addition in place of XOR (the
    generalized construction of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a
    composition of invertible rounds is a bijection. Because a and b are close to the square root, fewer than
    2·√n cells are out of range; these cells are permuted again (cycle walking).
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._a = math.isqrt(num_samples - 1) + 1
        self._b = -(-num_samples // self._a)
        self._cached_chunk: tuple[tuple[int, int], torch.Tensor] = (
            (-1, -1),
            torch.empty(0, dtype=torch.int64),
        )

    #: True if an epoch may contain a sample more than once.
    repeats = False

    def identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "num_samples": self.num_samples}

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the samples at positions [start, stop) of `epoch`, as int64 of shape [stop - start]."""
        low, high = start // _CHUNK, -(-stop // _CHUNK)
        if high - low == 1:
            return self._chunk(epoch, low)[start - low * _CHUNK : stop - low * _CHUNK]
        pieces = [
            self._chunk(epoch, chunk)[max(start - chunk * _CHUNK, 0) : stop - chunk * _CHUNK]
            for chunk in range(low, high)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def _chunk(self, epoch: int, chunk: int) -> torch.Tensor:
        """Return positions [chunk, chunk + 1) · _CHUNK of an epoch; the last chunk is cached."""
        if self._cached_chunk[0] != (epoch, chunk):
            positions = torch.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.num_samples))
            self._cached_chunk = ((epoch, chunk), self._walk(positions, self._round_keys(epoch)))
        return self._cached_chunk[1]

    def _walk(self, cells: torch.Tensor, keys: list[int]) -> torch.Tensor:
        cells = self._permute(cells, keys)
        while bool((outside := cells >= self.num_samples).any()):
            cells[outside] = self._permute(cells[outside], keys)
        return cells

    def _permute(self, cells: torch.Tensor, keys: list[int]) -> torch.Tensor:
        row, column = cells // self._b, cells % self._b
        for i, key in enumerate(keys):
            if i % 2:
                column = mix_bits(row, key).add_(column).remainder_(self._b)
            else:
                row = mix_bits(column, key).add_(row).remainder_(self._a)
        return row.mul_(self._b).add_(column)

    def _round_keys(self, epoch: int) -> list[int]:
        stem = f"{self.seed}/{epoch}/{self.num_samples}".encode()
        return [
            int.from_bytes(
                hashlib.blake2b(stem, digest_size=8, salt=bytes([i])).digest(), "little", signed=True
            )
            for i in range(_ROUNDS)
        ]


class SequentialOrder(SampleOrder):
    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "shuffle": False}

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:  # noqa: ARG002
        return torch.arange(start, stop)


def mix_bits(values: torch.Tensor, key: int) -> torch.Tensor:
    """Hash to [0, 2^62) with a key: the 64-bit finalizer of MurmurHash3, in wrapping int64 arithmetic."""
    x = (values * _signed(0x9E3779B97F4A7C15)).add_(key)
    x.bitwise_xor_(_shift_right(x, 33)).mul_(_signed(0xFF51AFD7ED558CCD))
    x.bitwise_xor_(_shift_right(x, 33)).mul_(_signed(0xC4CEB9FE1A85EC53))
    return _shift_right(x.bitwise_xor_(_shift_right(x, 33)), 2)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically; torch's `>>` on int64 copies the sign bit, which the mask removes."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
