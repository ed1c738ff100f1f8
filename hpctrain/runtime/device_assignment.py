"""Assign a device to each rank, with communication if two ranks could choose the same device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, DistNetworkError, Store  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks
from hpctrain.cluster.addresses import host_name
from hpctrain.cluster.device_plan import gpu_sharing_reason, is_mig, plan_device, visible_devices
from hpctrain.cluster.gpu_placement import RankPlacement, assign_gpus, check_unique_placement
from hpctrain.errors import EnvironmentMismatch, HpctrainError, RendezvousError
from hpctrain.files import parse_json_object
from hpctrain.runtime.rendezvous import REMIND_AFTER_S, remind
from hpctrain.text import format_ranks

_ANSWER_KEY, _READ_KEY = "answer", "read"
#: All connected ranks read the answer within milliseconds.
_READ_LIMIT_S = 5.0
#: Maximum pause between two searches of rank 0 for its peers.
_MAX_PAUSE_S = 0.1


@dataclass(frozen=True)
class DeviceAssignment:
    device: torch.device
    gpus_are_shared: bool
    """True if two ranks of the job use the same GPU, which NCCL does not support."""


def choose_device(ranks: Ranks, environ: Mapping[str, str], *, use_gpus: bool = True) -> torch.device:
    """Select the device of this rank without communication; the CPU if not `use_gpus`."""
    return _select_gpu(_plan(ranks, environ, len(visible_uuids(environ)) if use_gpus else 0))


def assign_device(
    ranks: Ranks, environ: Mapping[str, str], store: Store, *, use_gpus: bool = True, problem: str = ""
) -> DeviceAssignment:
    """Wait for all ranks, and select a device that no other rank uses. All ranks must call this.

    Every rank sends rank 0 its placement, its visible GPUs and its preferred GPU. Rank 0 checks for
    contradictions, and answers all. A `problem` of rank 0 ends all ranks.
    """
    placement = _own_placement(ranks, environ, use_gpus=use_gpus)
    if duplicate := _publish_placement(placement, store):
        _answer({"error": duplicate, "missing": False}, store)
        raise HpctrainError(duplicate)
    if ranks.is_main:
        try:
            if problem:
                raise RendezvousError(problem)
            _answer(_decide(_gather_placements(ranks, store), environ), store)
        except HpctrainError as error:
            _answer({"error": str(error), "missing": isinstance(error, RendezvousError)}, store)
    try:
        answer = _parse_entry(_ANSWER_KEY, store.get(_ANSWER_KEY))
    except DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        raise RendezvousError(f"lost the store of rank 0 ({reason}). Check the log of rank 0.") from error
    except DistError as error:
        raise _missing_ranks(ranks.world_size, store) from error
    if "error" in answer:
        _wait_until_read(ranks, store)
        raise (RendezvousError if answer["missing"] else HpctrainError)(answer["error"])
    return DeviceAssignment(_select_gpu(answer["indexes"][ranks.rank]), answer["shared"])


def _answer(answer: Mapping[str, Any], store: Store) -> None:
    """Answer all ranks; an earlier answer, which is an error, is kept."""
    store.compare_set(_ANSWER_KEY, "", json.dumps(answer))


def _decide(placements: list[RankPlacement], environ: Mapping[str, str]) -> dict[str, Any]:
    check_unique_placement(placements)
    indexes, shared = assign_gpus(placements, may_share=gpu_sharing_reason(environ) is not None)
    return {"indexes": [indexes.get(placement.rank) for placement in placements], "shared": shared}


def _parse_entry(key: str, text: bytes) -> dict[str, Any]:
    try:
        return parse_json_object(text, key)
    except ValueError:
        raise _foreign_entry(key) from None


def _foreign_entry(key: str) -> RendezvousError:
    return RendezvousError(f"the store entry {key!r} is not valid: another program changed it")


def _plan(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> int | None:
    return plan_device(ranks, environ, num_visible, is_rocm=torch.version.hip is not None).index


def visible_uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return unique ids of the GPUs visible to torch in this process, in the order of `cuda:N`."""
    if not torch.cuda.is_available():
        return ()
    if is_mig(environ):
        # torch may report the UUID of the physical GPU. CUDA shows a process only one MIG instance.
        return tuple((visible_devices(environ) or [])[:1])
    count = torch.cuda.device_count()
    return tuple(f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count))


def _own_placement(ranks: Ranks, environ: Mapping[str, str], *, use_gpus: bool) -> RankPlacement:
    gpus = visible_uuids(environ) if use_gpus else ()
    placement = RankPlacement(
        ranks.rank, ranks.node_rank, ranks.local_rank, host_name(environ), gpus, world_size=ranks.world_size
    )
    try:
        return replace(placement, index=_plan(ranks, environ, len(gpus)))
    except EnvironmentMismatch as error:
        return replace(placement, problem=str(error))


def _publish_placement(placement: RankPlacement, store: Store) -> str | None:
    """Send the placement of this rank. Return an error if another process has the same rank."""
    sent = {**asdict(placement), "pid": os.getpid()}
    key = _placement_key(placement.rank)
    # An existing value is kept and returned.
    stored = _parse_entry(key, store.compare_set(key, "", json.dumps(sent)))
    if stored["pid"] == sent["pid"] and stored["host"] == sent["host"]:
        return None
    return (
        f"Process {stored['pid']} on {stored['host']} and process {sent['pid']} on {sent['host']} both "
        f"claim rank {placement.rank}. Start one process per rank. To see the rank of each process, run "
        "`hpctrain env` with the same launcher."
    )


def _gather_placements(ranks: Ranks, store: Store) -> list[RankPlacement]:
    """Wait for the placements of all ranks. Return an empty list if another process has sent an answer."""
    keys = [_placement_key(rank) for rank in range(ranks.world_size)]
    begun = time.monotonic()
    remind_at, deadline = begun + REMIND_AFTER_S, begun + _timeout_s(store)
    pause_s = 0.002
    # torch warns about each wait that times out, so rank 0 polls.
    while not store.check(keys):
        if store.check([_ANSWER_KEY]):
            return []
        now = time.monotonic()
        if now >= deadline:
            raise _missing_ranks(ranks.world_size, store)
        if now >= remind_at:
            remind(ranks, _describe_missing(ranks.world_size, store))
            remind_at = deadline
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return [_parse_placement(key, text) for key, text in zip(keys, store.multi_get(keys), strict=True)]


def _timeout_s(store: Store) -> float:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return timeout.total_seconds()


def _describe_missing(world_size: int, store: Store) -> str:
    return format_ranks([rank for rank in range(world_size) if not store.check([_placement_key(rank)])])


def _missing_ranks(world_size: int, store: Store) -> RendezvousError:
    return RendezvousError(
        f"The world size is {world_size}, but {_describe_missing(world_size, store)} did not join within "
        f"{_timeout_s(store):.0f} s. Check the logs of the missing ranks."
    )


def _wait_until_read(ranks: Ranks, store: Store) -> None:
    """Keep rank 0 and its store alive until its peers have read the error."""
    num_read = store.add(_READ_KEY, 1)
    deadline = time.monotonic() + _READ_LIMIT_S
    while ranks.is_main and num_read < ranks.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        num_read = store.add(_READ_KEY, 0)


def _parse_placement(key: str, text: bytes) -> RankPlacement:
    fields = _parse_entry(key, text)
    try:
        del fields["pid"]
        return RankPlacement(**{**fields, "gpus": tuple(fields["gpus"])})
    except (KeyError, TypeError):
        raise _foreign_entry(key) from None


def _placement_key(rank: int) -> str:
    return f"seats/{rank}"


def _select_gpu(index: int | None) -> torch.device:
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
