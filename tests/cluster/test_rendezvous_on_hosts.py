"""Rendezvous of ranks on separate hosts, with all kinds of name resolution."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from helpers.separate_hosts import SeparateHosts, need_separate_hosts
from helpers.waiting import slowness

pytestmark = pytest.mark.ranks

#: Far more than a rendezvous takes, even on a busy machine.
LIMIT_S = 30.0
#: For rendezvous that cannot succeed.
SHORT_S = 2.5

RANK = """
import json, sys
from hpctrain.cluster.rendezvous import rendezvous
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import RendezvousError
import os
fields, timeout_s = json.loads(sys.argv[1])
try:
    meeting = rendezvous(Ranks(**fields), os.environ, timeout_s=timeout_s)
except RendezvousError as error:
    print(json.dumps({"failed": str(error)}))
else:
    print(json.dumps({
        "address": meeting.address, "port": meeting.port, "own_address": meeting.own_address,
        "gloo": meeting.gloo_variables(os.environ),
    }))
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
class Ranks:
    """Two ranks on n1 and one on each other host, each in its own process."""

    hosts: SeparateHosts
    master: str
    placed: tuple[str, ...] = ("n1", "n1", "n2", "n3")

    def join(
        self, *absent: int, timeout_s: float = LIMIT_S, env: dict[str, str] | None = None
    ) -> list[dict[str, object]]:
        key = f"{os.getpid()} {time.monotonic_ns()}"
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(self.start(rank, key, timeout_s, env or {}))
                for rank in range(len(self.placed))
                if rank not in absent
            ]
            return [json.loads(_output(process)) for process in processes]

    def start(
        self, rank: int, key: str, timeout_s: float, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        host = self.placed[rank]
        fields = {
            "rank": rank,
            "world_size": len(self.placed),
            "local_rank": self.placed[:rank].count(host),
            "local_world_size": self.placed.count(host),
            "node_rank": self.hosts.names.index(host),
            "num_nodes": len(set(self.placed)),
            "master_addr": self.master,
            "master_port": 0,
            "environment": "test",
            "rendezvous_id": key,
        }
        return self.hosts.start(host, [sys.executable, "-c", RANK, json.dumps([fields, timeout_s])], env)


def _output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def assert_joined(hosts: SeparateHosts, results: list[dict[str, object]]) -> None:
    """All at one port and at n1's address, and gloo listens on the network."""
    assert len({result.get("port") for result in results}) == 1, results
    assert [result.get("address") for result in results] == [hosts.address("n1")] * len(results), results
    own_addresses = [hosts.address(name) for name in ("n1", "n1", "n2", "n3")][: len(results)]
    assert [result["own_address"] for result in results] == own_addresses


def test_ranks_join_with_usual_names(hosts):
    results = Ranks(hosts, "n1").join()
    assert_joined(hosts, results)
    assert all(result["gloo"] == {} for result in results)


def test_own_name_may_resolve_to_a_loopback_address(hosts):
    """Debian's installer maps each host's own name to 127.0.1.1. Reports: nebius#177, PT#73656."""
    for host in hosts.names:
        hosts.set_hosts(host, {**{name: hosts.address(name) for name in hosts.names}, host: "127.0.1.1"})
    results = Ranks(hosts, "n1").join()
    assert_joined(hosts, results)
    assert all(result["gloo"] == {"GLOO_SOCKET_IFNAME": "eth0"} for result in results)


def test_own_name_may_be_unresolvable(hosts):
    hosts.set_hosts("n1", {})
    hosts.set_hosts("n2", {"n1": hosts.address("n1")})
    results = Ranks(hosts, "n1").join()
    assert_joined(hosts, results)
    assert [result["gloo"] for result in results] == [{"GLOO_SOCKET_IFNAME": "eth0"}] * 3 + [{}]


def test_interface_chosen_by_the_user_is_kept(hosts):
    hosts.set_hosts("n1", {"n1": "127.0.1.1"})
    assert all(result["gloo"] == {} for result in Ranks(hosts, "n1").join(env={"GLOO_SOCKET_IFNAME": "lo"}))


def test_master_may_be_an_alias(hosts):
    """The others know rank 0's host by another name than its own. Report: PT#73656."""
    for host in hosts.names:
        hosts.set_hosts(host, {host: hosts.address(host), "head-ib0": hosts.address("n1")})
    assert_joined(hosts, Ranks(hosts, "head-ib0").join())


def test_full_name_may_be_unknown_on_some_hosts(hosts):
    hosts.set_hosts("n1", {"n1.cluster": hosts.address("n1"), "n1": hosts.address("n1")})
    assert_joined(hosts, Ranks(hosts, "n1.cluster").join())


def test_names_may_resolve_to_ipv6_only(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {name: hosts.address6(name) for name in hosts.names})
    results = Ranks(hosts, "n1").join()
    assert [result["address"] for result in results] == [hosts.address6("n1")] * 4
    assert all(result["gloo"] == {} for result in results)


def test_each_host_keeps_the_address_by_which_it_reached_rank_0(hosts):
    hosts.set_hosts("n3", {"n1": hosts.address6("n1"), "n3": hosts.address("n3")})
    results = Ranks(hosts, "n1").join()
    addresses = [result["address"] for result in results]
    assert addresses[2:] == [hosts.address("n1"), hosts.address6("n1")]
    assert {*addresses[:2]} == {hosts.address("n1")}


def test_unresolvable_name_times_out_with_a_message(hosts):
    """Report: PT#150532, an unresolvable name hangs."""
    for host in hosts.names:
        hosts.set_hosts(host, {})
    start = time.monotonic()
    results = Ranks(hosts, "n1.cluster").join(timeout_s=SHORT_S)
    assert time.monotonic() - start < LIMIT_S * slowness()
    texts = [str(result["failed"]) for result in results]
    assert "1 of 3 peers have connected to n1.cluster, port " in texts[0]
    assert "missing: ranks 2-3" in texts[0]
    # A rank on rank 0's own host needs no name.
    assert "rank 0 at 127.0.0.1:" in texts[1]
    assert "missing: ranks 2-3" in texts[1]
    for text in texts[2:]:
        assert "the name n1.cluster: Temporary failure in name resolution" in text
        assert "the name n1: Temporary failure in name resolution" in text


def test_address_from_slurm_replaces_an_unresolvable_name(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {})
    assert_joined(hosts, Ranks(hosts, "n1").join(env={"SLURM_NODE_ALIASES": f"n1:{hosts.address('n1')}:n1"}))


def test_host_that_resolves_master_to_itself_reports_it(hosts):
    """As when all hosts are copies of one image."""
    hosts.set_hosts("n2", {"n1": "127.0.1.1"})
    results = Ranks(hosts, "n1").join(timeout_s=SHORT_S)
    assert "missing: rank 2" in str(results[0]["failed"])
    assert "the name n1: resolves to 127.0.1.1" in str(results[2]["failed"])
    assert "Connection refused" in str(results[2]["failed"])


def test_unresponsive_host_times_out(hosts):
    unreachable = "10.77.0.99"
    for host in hosts.names:
        hosts.set_hosts(host, {"n1": unreachable})
    start = time.monotonic()
    results = Ranks(hosts, "n1").join(0, 1, timeout_s=SHORT_S)
    assert time.monotonic() - start < LIMIT_S * slowness()
    for result in results:
        assert any(
            f"{unreachable}:" in str(result["failed"]) and reason in str(result["failed"])
            for reason in ("timed out", "No route to host")
        )


def test_unreachable_addresses_of_master_are_skipped(hosts):
    """A host may have an address in each of its networks, some reachable only from there."""
    # The resolver puts IPv6 addresses first, so these are tried before the one that works.
    unreachable = {f"n1 net{i}": f"fd77::{i}" for i in (97, 98)}
    for host in ("n2", "n3"):
        hosts.set_hosts(host, {**unreachable, "n1": hosts.address("n1"), host: hosts.address(host)})
    # A few seconds for each of the two, not for each of five ports on each.
    assert_joined(hosts, Ranks(hosts, "n1").join(timeout_s=14))


def test_two_hosts_that_claim_rank_0_are_both_reported(hosts):
    """Report: accelerate#2816, where every node took itself for the first."""
    key = f"{os.getpid()} {time.monotonic_ns()}"
    first = Ranks(hosts, "n1", placed=("n1", "n2", "n3")).start(0, key, LIMIT_S)
    second = Ranks(hosts, "n1", placed=("n2", "n1", "n3")).start(0, key, LIMIT_S)
    with first, second:
        texts = [json.loads(_output(process))["failed"] for process in (first, second)]
    for text in texts:
        assert "two processes claim rank 0 of 3: " in text
        assert "on n1" in text
        assert "on n2" in text
