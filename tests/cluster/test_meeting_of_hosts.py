"""How ranks find each other on hosts of their own, whatever the names of the hosts resolve to there."""

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

pytestmark = pytest.mark.ranks

#: Far more than a meeting takes, on a busy machine, too.
LIMIT_S = 30.0
#: For meetings that cannot succeed.
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
def _names_are_usual(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {name: hosts.address(name) for name in hosts.names})


@dataclass
class Ranks:
    """Two ranks on n1, one on each of the others; each on its host, in a process of its own."""

    hosts: SeparateHosts
    master: str
    placed: tuple[str, ...] = ("n1", "n1", "n2", "n3")

    def meet(
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
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def assert_met(hosts: SeparateHosts, ends: list[dict[str, object]]) -> None:
    """All at one port and at n1's address, and gloo listens on the network."""
    assert len({end.get("port") for end in ends}) == 1, ends
    assert [end.get("address") for end in ends] == [hosts.address("n1")] * len(ends), ends
    own = [hosts.address(name) for name in ("n1", "n1", "n2", "n3")][: len(ends)]
    assert [end["own_address"] for end in ends] == own


def test_with_names_as_they_should_be(hosts):
    ends = Ranks(hosts, "n1").meet()
    assert_met(hosts, ends)
    assert all(end["gloo"] == {} for end in ends)


def test_own_name_is_a_loopback_address_on_every_host(hosts):
    """As Debian's installer leaves it: 127.0.1.1 is each host's own name. Reports: nebius#177, PT#73656."""
    for host in hosts.names:
        hosts.set_hosts(host, {**{name: hosts.address(name) for name in hosts.names}, host: "127.0.1.1"})
    ends = Ranks(hosts, "n1").meet()
    assert_met(hosts, ends)
    assert all(end["gloo"] == {"GLOO_SOCKET_IFNAME": "eth0"} for end in ends)


def test_own_name_is_unknown_to_its_host(hosts):
    hosts.set_hosts("n1", {})
    hosts.set_hosts("n2", {"n1": hosts.address("n1")})
    ends = Ranks(hosts, "n1").meet()
    assert_met(hosts, ends)
    assert [end["gloo"] for end in ends] == [{"GLOO_SOCKET_IFNAME": "eth0"}] * 3 + [{}]


def test_an_interface_that_the_user_chose_stays(hosts):
    hosts.set_hosts("n1", {"n1": "127.0.1.1"})
    assert all(end["gloo"] == {} for end in Ranks(hosts, "n1").meet(env={"GLOO_SOCKET_IFNAME": "lo"}))


def test_an_alias(hosts):
    """The others know rank 0's host by another name than it gives itself. Report: PT#73656."""
    for host in hosts.names:
        hosts.set_hosts(host, {host: hosts.address(host), "head-ib0": hosts.address("n1")})
    assert_met(hosts, Ranks(hosts, "head-ib0").meet())


def test_a_full_name_that_only_some_hosts_know(hosts):
    hosts.set_hosts("n1", {"n1.cluster": hosts.address("n1"), "n1": hosts.address("n1")})
    assert_met(hosts, Ranks(hosts, "n1.cluster").meet())


def test_names_of_ipv6_only(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {name: hosts.address6(name) for name in hosts.names})
    ends = Ranks(hosts, "n1").meet()
    assert [end["address"] for end in ends] == [hosts.address6("n1")] * 4
    assert all(end["gloo"] == {} for end in ends)


def test_hosts_that_reach_rank_0_by_different_addresses_keep_each_its_own(hosts):
    hosts.set_hosts("n3", {"n1": hosts.address6("n1"), "n3": hosts.address("n3")})
    ends = Ranks(hosts, "n1").meet()
    addresses = [end["address"] for end in ends]
    assert addresses[2:] == [hosts.address("n1"), hosts.address6("n1")]
    assert {*addresses[:2]} == {hosts.address("n1")}


def test_an_unresolvable_name_fails_in_time_and_in_words(hosts):
    """Report: PT#150532, a name that does not resolve hangs."""
    for host in hosts.names:
        hosts.set_hosts(host, {})
    begun = time.monotonic()
    ends = Ranks(hosts, "n1.cluster").meet(timeout_s=SHORT_S)
    assert time.monotonic() - begun < SHORT_S + 10
    texts = [str(end["failed"]) for end in ends]
    assert "1 of 3 peers have connected to n1.cluster, port " in texts[0]
    assert "missing: ranks 2-3" in texts[0]
    # A rank on rank 0's own host needs no name.
    assert "rank 0 at 127.0.0.1:" in texts[1]
    assert "missing: ranks 2-3" in texts[1]
    for text in texts[2:]:
        assert "the name n1.cluster: Temporary failure in name resolution" in text
        assert "the name n1: Temporary failure in name resolution" in text


def test_slurms_own_address_of_rank_0s_host_stands_in_for_its_name(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {})
    assert_met(hosts, Ranks(hosts, "n1").meet(env={"SLURM_NODE_ALIASES": f"n1:{hosts.address('n1')}:n1"}))


def test_a_host_that_takes_rank_0s_name_for_its_own_says_so(hosts):
    """As where all hosts are copies of one image."""
    hosts.set_hosts("n2", {"n1": "127.0.1.1"})
    ends = Ranks(hosts, "n1").meet(timeout_s=SHORT_S)
    assert "missing: rank 2" in str(ends[0]["failed"])
    assert "the name n1: resolves to 127.0.1.1" in str(ends[2]["failed"])
    assert "Connection refused" in str(ends[2]["failed"])


def test_a_host_that_does_not_answer_is_not_waited_for(hosts):
    nobody = "10.77.0.99"
    for host in hosts.names:
        hosts.set_hosts(host, {"n1": nobody})
    begun = time.monotonic()
    ends = Ranks(hosts, "n1").meet(0, 1, timeout_s=SHORT_S)
    assert time.monotonic() - begun < SHORT_S + 10
    for end in ends:
        assert any(
            f"{nobody}:" in str(end["failed"]) and how in str(end["failed"])
            for how in ("timed out", "No route to host")
        )


def test_addresses_that_are_cut_off_from_some_hosts_do_not_cost_the_meeting(hosts):
    """As where a host has an address in each of its networks, and some are not for everybody."""
    # The resolver puts addresses of IPv6 first, so these are tried before the one that works.
    several = {f"n1 net{i}": f"fd77::{i}" for i in (97, 98)}
    for host in ("n2", "n3"):
        hosts.set_hosts(host, {**several, "n1": hosts.address("n1"), host: hosts.address(host)})
    # A few seconds for each of the two, and not for each of five ports on each.
    assert_met(hosts, Ranks(hosts, "n1").meet(timeout_s=14))


def test_two_hosts_that_both_think_they_are_rank_0_are_both_named(hosts):
    """Report: accelerate#2816, where every node took itself for the first."""
    key = f"{os.getpid()} {time.monotonic_ns()}"
    one = Ranks(hosts, "n1", placed=("n1", "n2", "n3")).start(0, key, LIMIT_S)
    other = Ranks(hosts, "n1", placed=("n2", "n1", "n3")).start(0, key, LIMIT_S)
    with one, other:
        texts = [json.loads(_output(process))["failed"] for process in (one, other)]
    for text in texts:
        assert "two processes claim rank 0 of 3: " in text
        assert "on n1" in text
        assert "on n2" in text
