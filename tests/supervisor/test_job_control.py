"""Lost nodes, from `scontrol show node` and from their slurmd."""

import os
import socket
from datetime import datetime

import pytest
from helpers.run_histories import make_spec

from hpctrain.errors import SchedulerError
from hpctrain.records.submit_successor import JobChanges
from hpctrain.rundir import RunDir
from hpctrain.slurm import config, job_requests, node_queries
from hpctrain.slurm.node_queries import NodeRecord, node_trouble, parse_nodes
from hpctrain.supervisor import job_control
from hpctrain.supervisor.job_control import SlurmJobControl, SlurmNodes
from hpctrain.supervisor.policy.job_intent import JobDisposition

RECORD = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   NodeAddr=10.0.0.1 NodeHostName=host-1 Port=26811 Version=22.05.8
   State=ALLOCATED ThreadsPerCore=1 TmpDisk=0
   RealMemory=1000 AllocMem=0 FreeMem=900 Sockets=8 Boards=1 MemSpecLimit=100
   Reason=State=DOWN Port=1 [root@2026-11-21T11:02:09]

NodeName=n2 Arch=x86_64 CoresPerSocket=1
   NodeAddr=n2 NodeHostName=n2 Version=22.05.8
   State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0
"""


def test_node_records_are_parsed():
    assert parse_nodes(RECORD) == [
        NodeRecord("n1", "10.0.0.1", 26811, "ALLOCATED", 900, "State=DOWN Port=1"),
        NodeRecord("n2", "n2", None, "DOWN*+DRAIN"),
    ]


def test_query_of_the_own_job_that_the_signal_to_the_job_kills_is_repeated(tmp_path):
    """Otherwise, a run whose script has requeued its job would be marked as completed."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\ncd {tmp_path}; echo >> calls; [ $(wc -l < calls) -gt 2 ] || kill -TERM $$\n"
        "echo 'JobId=7 JobName=a'; echo '   Requeue=1 Restarts=1'\n"
        "echo '   JobState=COMPLETING Reason=None'\n"
    )
    scontrol.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = SlurmJobControl(RunDir(tmp_path), make_spec(), {**environ, "SLURM_JOB_ID": "7"})
    assert job.disposition() is JobDisposition.REQUEUED
    (tmp_path / "calls").unlink()
    scontrol.write_text("#!/bin/sh\nkill -TERM $$\n")
    with pytest.raises(SchedulerError, match="exit code -15"):
        job.disposition()


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("JOB REQUEUE", "requeued with `scontrol requeue`, not `hpctrain requeue`"),
        ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "a node failed"),
        ("SIGNAL Killed", None),
    ],
)
def test_cause_of_a_requeue_is_read_from_the_job_log(tmp_path, reason, cause):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    clocks = ("2026-11-21T10:00:00", "2026-11-21T11:02:09", "2026-11-21T11:02:10")
    earlier, ended, _ = times = [datetime.fromisoformat(clock).timestamp() for clock in clocks]
    lines = [
        f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {clock} DUE TO {reason} ***\n"
        for clock, reason in zip(clocks, ("PREEMPTION", reason, "SIGNAL Terminated"), strict=True)
    ]
    run.slurm_log.write_text("".join(lines))
    since = earlier + 60
    jobs = SlurmJobControl(run, make_spec(), {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}).successors
    assert jobs.find_requeue(since) == (cause and (ended, cause))
    assert jobs.find_requeue(times[2] + 60) is None
    run.slurm_log.unlink()
    assert jobs.find_requeue(since) is None


@pytest.mark.parametrize(
    ("state", "draining"),
    [
        ("MIXED+DRAIN", {"n1": "Slurm reports the state MIXED+DRAIN (bad fan)"}),
        ("ALLOCATED+FAIL", {"n1": "Slurm reports the state ALLOCATED+FAIL (bad fan)"}),
        ("ALLOCATED", {}),
        ("DOWN+DRAIN", {}),
    ],
)
def test_draining_nodes_still_run_processes(tmp_path, monkeypatch, state, draining):
    record = NodeRecord("n1", "n1", 6818, state, reason="bad fan")
    monkeypatch.setattr(node_queries, "query_nodes", lambda hosts, environ: [record])
    nodes = SlurmNodes(RunDir(tmp_path), None, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"})
    assert nodes.draining(["n1"]) == draining
    assert nodes.own_host == "n0"


@pytest.mark.parametrize(
    ("environ", "refuses", "larger"),
    [
        ({"SLURM_MEM_PER_NODE": "400"}, False, "mem=600"),
        ({"SLURM_MEM_PER_NODE": "800"}, False, "mem=900"),
        ({"SLURM_MEM_PER_NODE": "900"}, False, None),
        ({"SLURM_MEM_PER_NODE": "400"}, True, None),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}, False, "mem-per-cpu=150"),
        ({"SLURM_MEM_PER_CPU": "200", "SLURM_CPUS_ON_NODE": "4"}, False, "mem-per-cpu=225"),
        ({"SLURM_MEM_PER_GPU": "400"}, False, None),
        ({}, False, None),
    ],
)
def test_larger_memory_is_at_most_that_of_the_node(tmp_path, monkeypatch, environ, refuses, larger):
    tests: list[JobChanges] = []

    def can_start(run, spec, changes, environ):
        tests.append(changes)
        return not refuses

    monkeypatch.setattr(job_control, "can_start", can_start)
    monkeypatch.setattr(job_control, "query_nodes", lambda hosts, environ: parse_nodes(RECORD)[:1])
    nodes = SlurmNodes(RunDir(tmp_path), None, {"SLURM_JOB_ID": "7", **environ})
    assert nodes.larger_memory(["n1"], ["n9"]) == larger
    assert tests in ([], [JobChanges(["n9"], larger or "mem=600")])


def test_refused_change_of_the_job_does_not_prevent_the_others(tmp_path, monkeypatch):
    fields = {}

    def update_job(jobs, environ, *, until_killed, **changed):
        fields.update(changed)
        if "ExcNodeList" in changed:
            raise SchedulerError("Invalid node name specified")

    monkeypatch.setattr(job_requests, "update_job", update_job)
    monkeypatch.setattr(job_requests, "_UPDATE_LIMIT_S", 0.1)
    spec = make_spec(directives={"exclude": "n8"})
    nodes = SlurmNodes(RunDir(tmp_path), spec, {"SLURM_JOB_ID": "7"})
    with pytest.raises(SchedulerError, match="Invalid node name"):
        nodes.change_job(JobChanges(["n9"], "mem-per-cpu=150"))
    assert fields == {"ExcNodeList": "n8,n9", "MinMemoryCPU": "150"}


@pytest.mark.parametrize(
    ("address", "state", "trouble"),
    [
        ("a" * 200, "IDLE", None),
        ("\0", "IDLE", None),
        ("no-such-host.invalid", "ALLOCATED", None),
        ("127.0.0.1", "ALLOCATED*+DRAIN", None),
        ("127.0.0.1", "ALLOCATED+REBOOT_REQUESTED", None),
        ("127.0.0.1", "MIXED+POWER_DOWN", None),
        ("127.0.0.1", "DOWN*", "Slurm reports the state DOWN*"),
        ("127.0.0.1", "IDLE+POWERED_DOWN", "Slurm reports the state IDLE+POWERED_DOWN"),
    ],
)
def test_node_is_lost_only_if_no_process_can_run_on_it(address, state, trouble):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert node_trouble(NodeRecord("n1", address, server.getsockname()[1], state)) == trouble


def test_nodes_have_the_port_of_the_cluster_unless_slurm_names_another(monkeypatch, tmp_path):
    """Slurm omits the SlurmdPort of its configuration, not 6818."""
    answers = {"node": RECORD, "config": "SlurmdPort              = 7003\n"}
    monkeypatch.setattr(node_queries, "run_slurm", lambda command, _environ: answers["node"])
    monkeypatch.setattr(config, "run_slurm", lambda command, _environ: answers["config"])
    seen = {}
    monkeypatch.setattr(node_queries, "node_trouble", lambda node: seen.update({node.name: node.port}))
    nodes = SlurmNodes(RunDir(tmp_path), None, {"SLURM_JOB_ID": "1"})
    assert nodes.lost(["n1", "n2"]) == {}
    assert seen == {"n1": 26811, "n2": 7003}


def test_node_without_slurmd_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "is not responding (ConnectionRefusedError)" in str(
        node_trouble(NodeRecord("n1", "127.0.0.1", port, "ALLOCATED"))
    )


def test_steps_are_killed_when_slurm_responds_again(tmp_path, monkeypatch):
    answers, killed = [SchedulerError("squeue failed: Socket timed out"), ["7.0"], []], []

    def list_steps(job_id, environ):
        if isinstance(answer := answers.pop(0), SchedulerError):
            raise answer
        return answer

    monkeypatch.setattr(job_requests, "list_steps", list_steps)
    monkeypatch.setattr(job_requests, "signal_steps", lambda steps, *_: killed.extend(steps))
    monkeypatch.setattr(job_requests, "_POLL_INTERVAL_S", 0.0)
    SlurmNodes(RunDir(tmp_path), None, {"SLURM_JOB_ID": "7"}).kill_steps()
    assert killed == ["7.0"]
    assert answers == []
