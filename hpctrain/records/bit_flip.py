"""A bit to flip in the memory of a rank, to test the detection of silent corruption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class FlipTarget(StrEnum):
    """Place of the bit."""

    PARAMETER = "parameter"
    """A parameter, after the step."""
    OPTIMIZER = "optimizer"
    """The optimizer state, after the step."""
    GRADIENT = "gradient"
    """The rank's own gradient, before the ranks exchange gradients."""
    ACTIVATION = "activation"
    """The output of a submodule in the forward pass."""


@dataclass(frozen=True)
class BitFlip:
    """A bit to flip; the seed determines tensor, element and bit."""

    rank: int
    target: FlipTarget = FlipTarget.PARAMETER
    seed: int = 0
    step: int = 0
    """Earliest step; 0 for the next one."""
    persistent: bool = False
    """Flip the same bit again in each later step of the process."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BitFlip:
        """Parse the result of `as_record`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the record is not valid.
        """
        return cls(
            int(record["rank"]),
            FlipTarget(record.get("target", FlipTarget.PARAMETER)),
            int(record.get("seed", 0)),
            int(record.get("step", 0)),
            bool(record.get("persistent", False)),
        )

    def as_record(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)
