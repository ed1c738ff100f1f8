"""Connect each rank to the store of rank 0, through which the ranks form a process group."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks
from hpctrain.cluster.addresses import master_host, resolve_host
from hpctrain.cluster.ports import bind_socket, raise_fd_limit
from hpctrain.errors import RendezvousError

#: Time after which a rank reports the peers that it is waiting for.
REMIND_AFTER_S = 30.0
#: Time limit for a host that drops packets.
_CONNECT_LIMIT_S = 3.0
#: Time limit for a second process with rank 0, which uses the same port.
_CONFLICT_LIMIT_S = 15.0
#: Maximum pause between two attempts to connect to rank 0.
_MAX_PAUSE_S = 0.2


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
            listener = _listen(ranks)
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
    results: queue.SimpleQueue[TCPStore | RuntimeError | OSError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            store = TCPStore(
                address,
                ranks.master_port,
                world_size=ranks.world_size,
                is_master=listener is not None,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except (RuntimeError, OSError) as error:
            results.put(error)
        else:
            results.put(store)

    threading.Thread(target=connect, name="hpctrain-store", daemon=True).start()
    try:
        result = results.get(timeout=limit_s + 1.0)
    except queue.Empty:
        raise TimeoutError("the program at this port does not answer") from None
    if isinstance(result, Exception):
        raise result
    return result


def remind(ranks: Ranks, awaited: str) -> None:
    name = f"rank {ranks.rank} on {socket.gethostname()}"
    print(f"hpctrain: {name} is waiting for {awaited}", file=sys.stderr, flush=True)


def _listen(ranks: Ranks) -> int:
    with bind_socket(ranks.master_port, local_only=ranks.master_addr == "127.0.0.1") as listener:
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


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
