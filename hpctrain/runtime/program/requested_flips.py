"""Bit flips that `hpctrain chaos` or a test requests from this process. The training loop performs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpctrain.records.bit_flip import BitFlip
from hpctrain.rundir import ATTEMPT_VARIABLE

#: A bit flip as JSON, for tests. Unless it is persistent, it happens only in the first attempt.
FLIP_BIT_VARIABLE = "HPCTRAIN_FLIP_BIT"

#: Requested flips of this process, which the training loop has not begun.
requested_flips: list[BitFlip] = []


def request_flip(rank: int, record: Mapping[str, Any]) -> None:
    """Request a flip if the record is for this rank. Called by the heartbeat thread."""
    flip = BitFlip.from_record(record)
    if flip.rank == rank:
        requested_flips.append(flip)


def request_flip_of_environment(rank: int, environ: Mapping[str, str]) -> None:
    """Request the flip in the environment, if any."""
    if text := environ.get(FLIP_BIT_VARIABLE):
        record = json.loads(text)
        if record.get("persistent") or environ.get(ATTEMPT_VARIABLE, "0") == "0":
            request_flip(rank, record)
