"""The device of a rank: chosen alone, or together with the peers, where two could choose the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks, compress_hostlist
from hpctrain.cluster.devices import is_mig, plan_device, sharing_allowed, visible_devices
from hpctrain.cluster.hosts import host_name
from hpctrain.cluster.seats import Seat, check_places, deal_gpus
from hpctrain.errors import EnvironmentMismatch, HpctrainError

_READ_KEY = "read"
#: Those that have come read an answer within milliseconds of it.
_READ_LIMIT_S = 5.0


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a job agreed on, for one of them."""

    device: torch.device
    gpus_are_shared: bool
    """Whether two ranks of the job compute on one GPU, which NCCL refuses."""


def choose_device(ranks: Ranks, environ: Mapping[str, str]) -> torch.device:
    """Take the device that the environment means for this rank (`plan_device`), asking nobody.

    Raises:
        EnvironmentMismatch: the node has more ranks than GPUs, and sharing them is not allowed.
    """
    return _take(plan_device(ranks, environ, len(visible_uuids(environ))).index)


def agree_on_device(ranks: Ranks, environ: Mapping[str, str], store: Store) -> Agreement:
    """Take a device that no other rank takes. All ranks must call this.

    Every rank tells rank 0 its place, the GPUs that it sees and the one that it means to take; rank 0 looks
    for contradictions and answers. That is one message each way for a rank, however many there are.

    Raises:
        HpctrainError: two ranks have one place or would share a GPU, or a rank did not come within the
            store's timeout. All ranks raise it, and it names the two.
    """
    _sit_down(_seat(ranks, environ), store)
    if ranks.is_main:
        for rank, text in enumerate(_answers(ranks.world_size, environ, store)):
            store.set(_answer_key(rank), text)
    answer = json.loads(store.get(_answer_key(ranks.rank)))
    if "error" in answer:
        _let_all_read(ranks, store)
        raise HpctrainError(answer["error"])
    return Agreement(_take(answer["index"]), answer["shared"])


def visible_uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What tells the GPUs that torch shows to this process from any other, in the order of `cuda:N`."""
    if not torch.cuda.is_available():
        return ()
    if is_mig(environ):
        # The properties may have the UUID of the whole GPU. CUDA shows a process one part only.
        return tuple((visible_devices(environ) or [])[:1])
    count = torch.cuda.device_count()
    return tuple(f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count))


def _seat(ranks: Ranks, environ: Mapping[str, str]) -> Seat:
    gpus = visible_uuids(environ)
    seat = Seat(ranks.rank, ranks.node_rank, ranks.local_rank, host_name(environ), gpus)
    try:
        return replace(seat, index=plan_device(ranks, environ, len(gpus)).index)
    except EnvironmentMismatch as error:
        return replace(seat, problem=str(error))


def _sit_down(seat: Seat, store: Store) -> None:
    mine = {**asdict(seat), "pid": os.getpid()}
    # What was there first stays, and is what comes back.
    there = json.loads(store.compare_set(_seat_key(seat.rank), "", json.dumps(mine)))
    if there["pid"] != mine["pid"] or there["host"] != mine["host"]:
        raise HpctrainError(
            f"Process {there['pid']} on {there['host']} and process {mine['pid']} on {mine['host']} both "
            f"take themselves for rank {seat.rank}. Start one process a rank; `hpctrain env` shows what each "
            "of them finds."
        )


def _answers(world_size: int, environ: Mapping[str, str], store: Store) -> list[str]:
    """What rank 0 tells each rank."""
    try:
        seats = _gather_seats(world_size, store)
        check_places(seats)
        deal = deal_gpus(seats, may_share=sharing_allowed(environ) is not None)
    except HpctrainError as error:
        return [json.dumps({"error": str(error)})] * world_size
    return [
        json.dumps({"index": deal.indexes.get(rank), "shared": deal.shared}) for rank in range(world_size)
    ]


def _gather_seats(world_size: int, store: Store) -> list[Seat]:
    keys = [_seat_key(rank) for rank in range(world_size)]
    begun = time.monotonic()
    try:
        store.wait(keys)
    except DistError as error:
        missing = compress_hostlist(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise HpctrainError(
            f"rank {missing} of {world_size} did not come within {time.monotonic() - begun:.0f} s of rank 0. "
            "Their logs may tell why."
        ) from error
    return [_read_seat(text) for text in store.multi_get(keys)]


def _let_all_read(ranks: Ranks, store: Store) -> None:
    """Keep rank 0, and with it a store of its own, until its peers know what is wrong."""
    num_read = store.add(_READ_KEY, 1)
    deadline = time.monotonic() + _READ_LIMIT_S
    while ranks.is_main and num_read < ranks.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        num_read = store.add(_READ_KEY, 0)


def _read_seat(text: bytes) -> Seat:
    fields: dict[str, Any] = json.loads(text)
    del fields["pid"]
    return Seat(**{**fields, "gpus": tuple(fields["gpus"])})


def _seat_key(rank: int) -> str:
    return f"seats/{rank}"


def _answer_key(rank: int) -> str:
    return f"answers/{rank}"


def _take(index: int | None) -> torch.device:
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
