"""A node without network: it keeps running, and the run continues without it."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.separate_hosts import SeparateHosts, need_separate_hosts
from helpers.training_runs import Run, assert_undisturbed, submit
from helpers.waiting import scaled, wait_for

from hpctrain.sandbox.daemons import Daemon, daemons
from hpctrain.sandbox.layout import ROOT, SandboxSize, folder_of, sandbox_lock
from hpctrain.sandbox.slurm_sandbox import create_folder, remove

_START_LIMIT_S = 60.0


class SeparateSlurm:
    """Host n1 runs the controller, and each other host is a node. Use as a context manager."""

    def __init__(self, nodes: int, settings: Sequence[str] = ()) -> None:
        """Describe a cluster with these lines of slurm.conf instead of the sandbox's."""
        self._hosts = SeparateHosts(1 + nodes)
        self._shape = SandboxSize(nodes=nodes, gpus_per_node=0, cpus_per_node=4, settings=tuple(settings))
        # The name by which a later session removes it if this one is killed.
        self._folder = folder_of(f"pytest-n{os.getpid()}")

    def __enter__(self) -> Self:
        self._hosts.__enter__()
        try:
            with sandbox_lock(ROOT):
                self._plan = create_folder(self._folder, self._shape)
            self.nodes, self.env = self._plan.nodes, {"SLURM_CONF": str(self._plan.conf)}
            self._write_conf()
            munged, *others = daemons(self._plan)
            munged.start()
            for daemon in others:
                self._start(daemon)
            wait_for(lambda: set(self.states().values()) == {"idle"}, _START_LIMIT_S, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with sandbox_lock(ROOT):
            # Its controller cannot be reached from here.
            remove(self._folder, came_up=False)
        self._hosts.__exit__()

    def run(
        self, argv: Sequence[str | Path], timeout: float = 60.0, *, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return run_command(self._hosts.words("n1", argv), self.env, timeout=timeout, check=check)

    def call_hpctrain(self, args: Sequence[str], _env: Mapping[str, str], **options: Any) -> Any:
        return self.run([sys.executable, "-m", "hpctrain", *args], **options)

    def states(self) -> dict[str, str]:
        """Return Slurm's state of each node; an empty dict while the controller does not answer."""
        result = self.run(
            ["sinfo", "--noheader", "--Node", "--partition=preemptible", "-o%N %T"], check=False
        )
        return dict(line.split() for line in result.stdout.splitlines())

    def isolate(self, node: str) -> None:
        self._hosts.plug(self._host(node), plugged=False)

    def reconnect(self, node: str) -> None:
        self._hosts.plug(self._host(node), plugged=True)

    def _host(self, node: str) -> str:
        return f"n{2 + self.nodes.index(node)}"

    def _start(self, daemon: Daemon) -> None:
        host = "n1" if daemon.node is None else self._host(daemon.node)
        process = self._hosts.start(host, daemon.argv, daemon.environ)
        out, err = process.communicate(timeout=scaled(_START_LIMIT_S))
        assert process.returncode == 0, f"{daemon.label}: {out}{err}{daemon.log_tail()}"

    def _write_conf(self) -> None:
        hosts = {self._host(node): node for node in self.nodes}
        addresses = {name: self._hosts.address(name) for name in self._hosts.names}
        for name in self._hosts.names:
            node_addresses = {node: addresses[host] for host, node in hosts.items()}
            self._hosts.set_hosts(name, {**addresses, **node_addresses})
        text = self._plan.conf.read_text()
        common = re.search(r"^NodeName=.*? (CPUs=.*)$", text, re.MULTILINE)
        assert common is not None
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr={addresses[host]} Port=6818 {common[1]}"
            for host, node in hosts.items()
        ]
        text = re.sub(r"^NodeName=.*$", "\n".join(lines), text, flags=re.MULTILINE)
        text = re.sub(r"^SlurmctldHost=.*$", f"SlurmctldHost=n1({addresses['n1']})", text, flags=re.MULTILINE)
        self._plan.conf.write_text(text)
        # It would need a mounted file system that nothing here uses.
        self._plan.conf.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def cluster(request: pytest.FixtureRequest):
    """Three nodes; Slurm marks a silent one as down after so many seconds."""
    need_separate_hosts()
    with SeparateSlurm(3, [f"SlurmdTimeout={request.param}"]) as cluster:
        yield cluster


def isolate(cluster: SeparateSlurm, path, index: int) -> tuple[Run, str]:
    """Isolate a node of a run; return the run and the node."""
    shape = ["--nodes", "2:3", "--ntasks-per-node", "1", "--hang-timeout", "4"]
    no_dropout = ["--dropout", "0"]
    run = submit(path, cluster.env, shape, step_s=0.2, further=no_dropout, call=cluster.call_hpctrain)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][index]
    cluster.isolate(victim)
    return run, victim


def reconnect_and_check(cluster: SeparateSlurm, run: Run, victim: str, reference) -> None:
    """Processes on the node do no harm, and end as soon as Slurm reaches it."""
    cluster.reconnect(victim)
    assert_no_process_left(run.path, 60)
    assert_undisturbed(run, reference(2, "--dropout", "0"), rounding=True)


@pytest.mark.parametrize("cluster", [300], indirect=True)
def test_supervisor_shrinks_the_run_before_slurm_marks_the_node_down(cluster, reference, tmp_path):
    run, victim = isolate(cluster, tmp_path / "run", 2)
    assert run.wait() == 0
    failure, shrink = run.events("failure")[0], run.events("shrink")[0]
    assert (failure["class"], failure["host"]) == ("node-lost", victim)
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (3, 2, [victim])
    assert run.events("requeue") == []
    reconnect_and_check(cluster, run, victim, reference)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("index", [2, 0], ids=["ranks", "supervisor"])
def test_slurm_marks_the_node_down_and_requeues_the_job(cluster, reference, tmp_path, index):
    """If it is the supervisor's node, there are two supervisors for a while; only one may continue."""
    run, victim = isolate(cluster, tmp_path / "run", index)
    wait_for(lambda: "down" in cluster.states()[victim], 60, "the node's end in Slurm's eyes")
    assert run.wait() == 0
    assert [event["nodes"] for event in run.events("started")] == [3, 2]
    reconnect_and_check(cluster, run, victim, reference)
