"""Rendezvous of ranks through the store of rank 0, in threads of one process and on separate hosts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from helpers.separate_hosts import SeparateHosts, need_separate_hosts
from helpers.waiting import slowness, wait_for
from torch.distributed import PrefixStore, TCPStore

from hpctrain.cluster import Ranks
from hpctrain.cluster.ports import rendezvous_port
from hpctrain.errors import HpctrainError, RendezvousError
from hpctrain.runtime import rendezvous as module
from hpctrain.runtime.rendezvous import assign_device, connect_store

pytestmark = pytest.mark.ranks

#: Far more than a rendezvous takes, even on a busy machine.
LIMIT_S = 30.0
#: For rendezvous that cannot succeed.
SHORT_S = 2.5 * slowness()


@pytest.fixture
def key() -> str:
    """Return a key whose port no program on this machine uses."""
    while True:
        key = f"{os.getpid()} {time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            socket.create_server(("", rendezvous_port(key))).close()
            return key


def ranks_of(key: str, rank: int, world_size: int) -> Ranks:
    port = rendezvous_port(key)
    return Ranks(rank, world_size, rank, world_size, 0, 1, "localhost", port, "test", key)


def join(ranks: Ranks, timeout_s: float = LIMIT_S, host: str = "n1") -> TCPStore:
    """Join the others; rank 0 must keep its store until they have joined."""
    store, problem = connect_store(ranks, {}, timeout_s)
    prefixed = PrefixStore(ranks.rendezvous_id, store)
    assign_device(ranks, {"SLURMD_NODENAME": host}, prefixed, use_gpus=False, problem=problem)
    return store


def failures(futures: list[Future[TCPStore]]) -> list[str]:
    """Return the error of each rank; fail if a rank has none."""
    texts = []
    for future in futures:
        with pytest.raises(HpctrainError) as error:
            future.result()
        texts.append(str(error.value))
    return texts


def test_ranks_join_in_any_order(key):
    with ThreadPoolExecutor(4) as pool:
        futures = []
        for rank in (3, 1, 0, 2):
            futures.append(pool.submit(join, ranks_of(key, rank, 4)))
            time.sleep(0.1)
        for future in futures:
            future.result()


def test_lost_rank_0_is_reported(key):
    """Rank 0 exits after it has answered."""
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(join, ranks_of(key, 1, 2))
        store, _ = connect_store(ranks_of(key, 0, 2), {}, LIMIT_S)
        time.sleep(0.5)
        del store
    assert failures([late])[0].startswith("lost the store of rank 0")


def test_missing_ranks_are_reported_once_and_end_all_present(key, monkeypatch, capfd):
    monkeypatch.setattr(module, "REMIND_AFTER_S", 0.1)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(join, ranks_of(key, rank, 6), SHORT_S) for rank in (0, 1, 3)]
    for text in failures(futures):
        assert "The world size is 6, but ranks 2, 4-5 did not join within " in text
    assert capfd.readouterr().err.count("is waiting for ranks 2, 4-5") == 1


def test_missing_rank_0_is_reported_with_the_addresses_that_were_tried(key, monkeypatch, capfd):
    monkeypatch.setattr(module, "REMIND_AFTER_S", 0.1)
    with pytest.raises(RendezvousError) as error:
        join(ranks_of(key, 1, 2), timeout_s=0.5)
    tried = f"127.0.0.1, port {rendezvous_port(key)}: Connection refused"
    assert tried in str(error.value)
    assert capfd.readouterr().err.count(tried) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_one_rank_are_reported_to_all(key, rank):
    """The number of processes is right, so one rank is missing."""
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(join, ranks_of(key, present, 4)) for present in (0, 1, 2)]
        futures.append(pool.submit(join, ranks_of(key, rank, 4), LIMIT_S, "n2"))
    for text in failures(futures):
        assert f"both claim rank {rank}. Start one process per rank." in text
        assert "on n1" in text
        assert "on n2" in text


def test_second_rank_0_that_joins_before_the_first_is_reported_to_both(key):
    ranks = ranks_of(key, 0, 2)
    store, _ = connect_store(ranks, {}, LIMIT_S)
    prefixed = PrefixStore(ranks.rendezvous_id, store)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(join, ranks, LIMIT_S, "n2")
        wait_for(lambda: prefixed.check(["seats/0"]), 20, "the second rank 0")
        first = pool.submit(assign_device, ranks, {"SLURMD_NODENAME": "n1"}, prefixed, use_gpus=False)
    assert all("both claim rank 0" in text for text in failures([first, second]))


def test_port_that_another_program_uses_is_reported(key, monkeypatch):
    monkeypatch.setattr(module, "_CONFLICT_LIMIT_S", 0.5)
    # It accepts connections, but does not answer.
    with socket.create_server(("", rendezvous_port(key))):
        with pytest.raises(RendezvousError, match=r"cannot listen on port \d+ \(Address already in use\)"):
            join(ranks_of(key, 0, 2))
        with pytest.raises(RendezvousError, match="the program at this port does not answer"):
            join(ranks_of(key, 1, 2), timeout_s=SHORT_S)


RANK = """
import json, os, sys
from hpctrain.cluster import Ranks
from hpctrain.errors import HpctrainError
from hpctrain.runtime import distributed_context as module
fields, module.JOIN_TIMEOUT_S = json.loads(sys.argv[1])
try:
    context = module.init_distributed(Ranks(**fields), os.environ, use_gpus=False)
except HpctrainError as error:
    print(json.dumps({"failed": str(error)}), flush=True)
else:
    context.barrier()
    print(json.dumps({"joined": True, "gloo": os.environ.get("GLOO_SOCKET_IFNAME")}), flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[SeparateHosts]:
    need_separate_hosts()
    with SeparateHosts(3) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def _set_usual_names(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {name: hosts.address(name) for name in hosts.names})


@dataclass
class Step:
    """Two ranks on n1 and one on each other host, each in its own process."""

    hosts: SeparateHosts
    master: str
    placed: tuple[str, ...] = ("n1", "n1", "n2", "n3")

    def join(self, env: dict[str, str]) -> list[dict[str, object]]:
        key = f"{os.getpid()} {time.monotonic_ns()}"
        with contextlib.ExitStack() as stack:
            ranks = range(len(self.placed))
            processes = [stack.enter_context(self.start(rank, key, env)) for rank in ranks]
            # gloo of torch 2.8 prints further lines.
            return [json.loads(_output(process).splitlines()[-1]) for process in processes]

    def start(self, rank: int, key: str, env: dict[str, str]) -> subprocess.Popen[str]:
        host = self.placed[rank]
        fields = {
            "rank": rank,
            "world_size": len(self.placed),
            "local_rank": self.placed[:rank].count(host),
            "local_world_size": self.placed.count(host),
            "node_rank": self.hosts.names.index(host),
            "num_nodes": len(set(self.placed)),
            "master_addr": self.master,
            "master_port": rendezvous_port(key),
            "environment": "test",
            "rendezvous_id": key,
        }
        return self.hosts.start(host, [sys.executable, "-c", RANK, json.dumps([fields, 2 * LIMIT_S])], env)


def _output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_own_name_may_be_unresolvable(hosts):
    """Without an address of another host, gloo would listen on a loopback address."""
    hosts.set_hosts("n1", {})
    hosts.set_hosts("n2", {"n1": hosts.address("n1"), "n2": "127.0.1.1"})
    env = {"SLURM_LAUNCH_NODE_IPADDR": hosts.address("n3")}
    interfaces = ["eth0", "eth0", "eth0", None]
    assert Step(hosts, "n1").join(env) == [{"joined": True, "gloo": interface} for interface in interfaces]


@pytest.mark.extended
@pytest.mark.parametrize("names", ["alias", "ipv6", "slurm", "unreachable"])
def test_address_of_rank_0_is_found(hosts, names):
    """Reports: PT#73656 (the others know rank 0's host by another name), PT#150532 (unresolvable names)."""
    step, env = Step(hosts, "n1", ("n1", "n2")), {}
    match names:
        case "alias":
            step.master = "head-ib0"
            for host in hosts.names:
                hosts.set_hosts(host, {host: hosts.address(host), "head-ib0": hosts.address("n1")})
        case "ipv6":
            for host in hosts.names:
                hosts.set_hosts(host, {name: hosts.address6(name) for name in hosts.names})
        case "slurm":
            env = {"SLURM_NODE_ALIASES": f"n1:{hosts.address('n1')}:n1"}
            hosts.set_hosts("n2", {"n2": hosts.address("n2")})
        case "unreachable":
            # The resolver puts IPv6 addresses first.
            hosts.set_hosts(
                "n2", {"n1 net98": "fd77::98", "n1": hosts.address("n1"), "n2": hosts.address("n2")}
            )
    assert step.join(env) == [{"joined": True, "gloo": None}] * 2
