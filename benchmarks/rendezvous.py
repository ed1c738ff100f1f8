"""Time for many simulated hosts to connect to the supervisor and meet in its store.

    python benchmarks/rendezvous.py [--hosts N] [--rounds N]

Each host consists of two connections: to the supervisor, with the authentication of a rank, and to the store,
in which the host writes a signed value and waits for the last host. Two processes contain all hosts. The
connections that gloo or NCCL open between the ranks afterwards are excluded. Requires Linux and root, for a
network namespace.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

from results import Results
from torch.distributed import TCPStore

from hpctrain.authentication import new_secret
from hpctrain.cluster import Ranks
from hpctrain.cluster.ports import raise_fd_limit
from hpctrain.rundir import SUPERVISOR_ADDRESS_VARIABLE
from hpctrain.runtime.supervisor_connection import SupervisorConnection
from hpctrain.supervisor.launch.job_step import RendezvousStore
from hpctrain.supervisor.workers.heartbeat_server import HeartbeatServer

NUM_PROCESSES = 2
LIMIT_S = 300


class Handler:
    """Counts the hosts that have sent a message."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()

    def on_message(self, _attempt: int, rank: int, _message: Mapping[str, Any]) -> None:
        self.ranks.add(rank)

    def on_disconnect(self, _attempt: int, _rank: int) -> None:
        """Ignore the end of a connection."""

    def on_tick(self) -> None:
        """Do nothing."""


def meet(first: int, last: int, num_hosts: int, environ: dict[str, str], times: Queue[float]) -> None:
    """Connect some of the hosts, and report when all hosts have met."""
    raise_fd_limit(num_hosts)
    port, timeout = int(environ["MASTER_PORT"]), timedelta(seconds=LIMIT_S)
    connections = []
    for rank in range(first, last):
        ranks = Ranks(rank, num_hosts, 0, 1, rank, num_hosts, "127.0.0.1", port, "slurm")
        connection = SupervisorConnection(environ[SUPERVISOR_ADDRESS_VARIABLE], ranks, 0)
        connection.send({"ready": True})
        store = TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False)
        store.set(f"address/{rank}", "127.0.0.1")
        if store.add("arrived", 1) == num_hosts:
            store.set("all", "")
        connections.append((connection, store))
    for _, store in connections:
        store.get("all")
    times.put(time.monotonic())
    # The other process may still wait for its hosts.
    time.sleep(1.0)


def measure(num_hosts: int) -> float:
    """Return the seconds until all hosts have met."""
    secret, handler = new_secret(), Handler()
    with (
        RendezvousStore("127.0.0.1", hosted=True) as rendezvous,
        HeartbeatServer("127.0.0.1", handler) as server,
    ):
        rendezvous.serve()
        environ = {**secret, **rendezvous.variables, **server.variables}
        bounds = [num_hosts * part // NUM_PROCESSES for part in range(NUM_PROCESSES + 1)]
        context = multiprocessing.get_context("spawn")
        times, go = context.Queue(), context.Barrier(NUM_PROCESSES + 1)
        processes = [
            context.Process(target=start, args=(go, first, last, num_hosts, environ, times))
            for first, last in itertools.pairwise(bounds)
        ]
        for process in processes:
            process.start()
        go.wait(LIMIT_S)
        begun = time.monotonic()
        end = max(times.get(timeout=LIMIT_S) for _ in processes)
        for process in processes:
            process.join(LIMIT_S)
        if len(handler.ranks) != num_hosts:
            raise SystemExit(f"{num_hosts} hosts met, but the supervisor received {len(handler.ranks)}")
    return end - begun


def start(go: Any, *arguments: Any) -> None:
    """Wait for all processes, so that imports are excluded."""
    go.wait(LIMIT_S)
    meet(*arguments)


def main() -> None:
    if os.environ.get("NAMESPACE") != "1":
        # torch looks up the name of each peer. In a network of its own, no query leaves this machine.
        command = f'ip link set lo up && exec "{sys.executable}" "$@"'
        environ = {**os.environ, "NAMESPACE": "1"}
        sys.exit(subprocess.call(["unshare", "--net", "sh", "-c", command, "sh", *sys.argv], env=environ))
    results = Results(__doc__)
    results.parser.add_argument("--hosts", type=int, default=4000)
    results.parser.add_argument("--rounds", type=int, default=3)
    options = results.parse()
    raise_fd_limit(3 * options.hosts)
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    found = [measure(options.hosts) for _ in range(options.rounds)]
    results.add(f"rendezvous of {options.hosts:,} hosts", found, "s", limit=10.0)
    results.finish()


if __name__ == "__main__":
    main()
