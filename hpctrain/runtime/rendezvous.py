"""Connect each rank to the store of rank 0, and assign each a device that no other rank uses."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks
from hpctrain.cluster.addresses import host_name, resolve_host
from hpctrain.cluster.device_plan import gpu_sharing_reason, plan_device
from hpctrain.cluster.gpu_assignment import RankPlacement, assign_gpus, check_unique_placement
from hpctrain.cluster.master_address import master_host
from hpctrain.cluster.ports import bind_socket, raise_fd_limit, store_options
from hpctrain.cluster.visible_gpus import is_mig, visible_devices
from hpctrain.errors import EnvironmentMismatch, HpctrainError, RendezvousError
from hpctrain.files import parse_json_object
from hpctrain.text import format_ranks

#: Time after which a rank reports the peers that it is waiting for.
REMIND_AFTER_S = 30.0
#: Time limit for a host that drops packets.
_CONNECT_LIMIT_S = 3.0
#: Time limit for a second process with rank 0, which uses the same port.
_CONFLICT_LIMIT_S = 15.0
#: Maximum pause between two attempts to connect to rank 0.
_MAX_PAUSE_S = 0.2
_ANSWER_KEY, _READ_KEY = "answer", "read"
#: All connected ranks read the answer within milliseconds.
_READ_LIMIT_S = 5.0
#: Maximum pause between two searches of rank 0 for its peers.
_MAX_POLL_S = 0.1


def connect_store(ranks: Ranks, environ: Mapping[str, str], timeout_s: float) -> tuple[TCPStore, str]:
    """Return the store of rank 0, which hosts it, and the reason why rank 0 cannot host it, or "".

    The agent of torchrun may host the store instead. Without a supervisor, the port is computed from the ids
    of the job. If another process uses the port, rank 0 connects to it, because it may be a second rank 0.
    """
    deadline = time.monotonic() + timeout_s
    port, listener, problem = ranks.master_port, None, ""
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.is_main and not has_agent_store:
        raise_fd_limit(ranks.world_size)
        try:
            with bind_socket(port, local_only=ranks.master_addr == "127.0.0.1") as bound:
                bound.listen(socket.SOMAXCONN)
                listener = bound.detach()
        except OSError as error:
            problem = (
                f"rank 0 cannot listen on port {port} ({error.strerror}). To find the program that uses the "
                "port, run `ss --tcp --all --processes`. Alternatively, set MASTER_PORT to a free port on "
                "every rank"
            )
    address = ranks.master_addr if has_agent_store else _await_listener(ranks, environ, deadline)
    limit_s = _CONFLICT_LIMIT_S if problem else max(1.0, deadline - time.monotonic())
    try:
        return _connect(address, ranks, listener, limit_s), problem
    except (RuntimeError, OSError) as error:
        raise RendezvousError(problem or f"no store at {address}, port {port}: {error}") from error


def _connect(address: str, ranks: Ranks, listener: int | None, limit_s: float) -> TCPStore:
    """Connect in a thread, because torch has no time limit for a program that accepts and does not answer."""
    connected: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            store = TCPStore(
                address,
                ranks.master_port,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=limit_s),
                **store_options(listener, torch.__version__),
            )
            connected.set_result(store)
        except (RuntimeError, OSError) as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="hpctrain-store", daemon=True).start()
    try:
        return connected.result(limit_s + 1.0)
    except TimeoutError:
        raise TimeoutError("the program at this port does not answer") from None


def remind(ranks: Ranks, awaited: str) -> None:
    name = f"rank {ranks.rank} on {socket.gethostname()}"
    print(f"hpctrain: {name} is waiting for {awaited}", file=sys.stderr, flush=True)


def _await_listener(ranks: Ranks, environ: Mapping[str, str], deadline: float) -> str:
    """Return the address at which rank 0 listens. torch's store would wait a second between two attempts."""
    port, pause_s, remind_at = ranks.master_port, 0.01, time.monotonic() + REMIND_AFTER_S
    while True:
        host, problems = master_host(ranks, environ), []
        try:
            addresses = resolve_host(host)
        except OSError as error:
            addresses = []
            problems.append(f"the name {host}: {error.strerror or error}")
        for address in addresses:
            try:
                socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S).close()
                return address
            except OSError as error:
                problems.append(f"{address}, port {port}: {error.strerror or error}")
        awaited = f"rank 0 at {host}, port {port} ({'; '.join(problems)})"
        if time.monotonic() > deadline:
            raise RendezvousError(f"did not find {awaited}")
        if time.monotonic() > remind_at:
            remind(ranks, awaited)
            remind_at = deadline
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def choose_device(ranks: Ranks, environ: Mapping[str, str], *, use_gpus: bool = True) -> torch.device:
    """Select the device of this rank without communication; the CPU if not `use_gpus`."""
    return _select_gpu(_plan(ranks, environ, len(visible_uuids(environ)) if use_gpus else 0))


def assign_device(
    ranks: Ranks, environ: Mapping[str, str], store: Store, *, use_gpus: bool = True, problem: str = ""
) -> tuple[torch.device, bool]:
    """Collective. Return the device of this rank, and true if ranks share a GPU, which NCCL does not support.

    Every rank sends rank 0 its placement, its visible GPUs and its preferred GPU. Rank 0 checks for
    contradictions, and answers all. A `problem` of rank 0 ends all ranks.
    """
    host, gpus, trouble = host_name(environ), visible_uuids(environ) if use_gpus else (), ""
    try:
        index = _plan(ranks, environ, len(gpus))
    except EnvironmentMismatch as error:
        index, trouble = None, str(error)
    placement = RankPlacement(
        ranks.rank, ranks.node_rank, ranks.local_rank, host, gpus, index, trouble, ranks.world_size
    )
    if duplicate := _publish_placement(placement, store):
        _answer({"error": duplicate, "missing": False}, store)
        _wait_until_read(ranks, store)
        raise HpctrainError(duplicate)
    if ranks.is_main:
        try:
            placements = _gather_placements(ranks, store, problem)
            check_unique_placement(placements)
            indexes, shared = assign_gpus(placements, may_share=gpu_sharing_reason(environ) is not None)
            chosen = [indexes.get(placement.rank) for placement in placements]
            _answer({"indexes": chosen, "shared": shared}, store)
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
    return _select_gpu(answer["indexes"][ranks.rank]), answer["shared"]


def _answer(answer: Mapping[str, Any], store: Store) -> None:
    """Answer all ranks; an earlier answer, which is an error, is kept."""
    kept = store.compare_set(_ANSWER_KEY, "", json.dumps(answer))
    # The store of torch 2.6 wakes the ranks that wait only for this call.
    store.set(_ANSWER_KEY, kept.decode())


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


def _gather_placements(ranks: Ranks, store: Store, problem: str = "") -> list[RankPlacement]:
    """Wait for the placements of all ranks. Return an empty list if another process has sent an answer.

    After a `problem`, only wait for that answer: the store may be that of a second rank 0, which finds the
    duplicate.
    """
    keys = [_placement_key(rank) for rank in range(ranks.world_size)]
    begun, pause_s = time.monotonic(), 0.002
    remind_at = begun + REMIND_AFTER_S
    deadline = begun + (_CONFLICT_LIMIT_S if problem else _timeout_s(store))
    # torch warns about each wait that times out, so rank 0 polls.
    while problem or not store.check(keys):
        if store.check([_ANSWER_KEY]):
            return []
        now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(problem) if problem else _missing_ranks(ranks.world_size, store)
        if now >= remind_at:
            remind(ranks, _describe_missing(ranks.world_size, store))
            remind_at = deadline
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
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
