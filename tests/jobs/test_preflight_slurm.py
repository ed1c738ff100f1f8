"""Preflight checks against a real cluster: refused jobs, notes and forecasts."""

import os
import re
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for
from msgspec.structs import replace

from hpctrain import sandbox
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends.job_request import JobRequest
from hpctrain.jobs.backends.mounts import path_notes
from hpctrain.jobs.backends.site_check import check_request, explain_refusal
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.job_requests import describe_start
from hpctrain.slurm.site_facts import Site, SiteConventions, parse_partition

STRICT = [
    "JobRequeue=0",
    "PreemptMode=CANCEL",
    "MaxArraySize=21",
    "PartitionName=preemptible Nodes=ALL Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=0 State=UP",
    "PartitionName=short Nodes=ALL MaxTime=30 DefaultTime=1 MaxNodes=1",
    "PartitionName=wide Nodes=ALL MinNodes=2 MaxMemPerNode=1000 MaxCPUsPerNode=4",
    "PartitionName=physics Nodes=ALL AllowAccounts=physics DenyQos=slow",
    "PartitionName=reserved Nodes=ALL ReqResv=YES",
    "PartitionName=drained Nodes=ALL State=DRAIN",
    "PartitionName=broken Nodes=ALL State=DOWN",
    "PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE",
    "PartitionName=thin Nodes=ALL MaxCPUsPerNode=2 DefaultTime=10",
]

#: More memory than any machine has.
TOO_MUCH = "900T"


@pytest.fixture(scope="module")
def strict_cluster() -> Iterator[sandbox.Sandbox]:
    """A cluster of two nodes with two a100 each, all kinds of partitions, and a feature on its first node."""
    name = f"strict-{os.getpid()}"
    try:
        box = sandbox.up(name, nodes=2, gpu_type="a100", settings=STRICT)
        run_command(
            ["scontrol", "update", f"NodeName={name}-1", "AvailableFeatures=fast", "ActiveFeatures=fast"],
            box.env,
        )
        yield box
    finally:
        sandbox.down(name)


@pytest.fixture
def submission(strict_cluster, prepared):
    """`prepare_submission` for the strict cluster."""

    def call(env=None, **options):
        options.setdefault("time", "10")
        return prepared(
            backend="slurm", environ=environment({**strict_cluster.env, **(env or {})}), **options
        )

    return call


pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"partition": "short", "time": "1:00:00"},
            r"01:00:00 was requested \(--time\), but partition short allows at most 00:30:00 \(MaxTime\)\.",
        ),
        (
            {"partition": "short", "time": "unlimited"},
            r"An unlimited time was requested \(--time\), but partition short allows at most 00:30:00",
        ),
        (
            {"partition": "short", "time": None},
            r"without --time after 00:01:00 \(DefaultTime\), but the ranks stop and save 120 s",
        ),
        ({"partition": "wide"}, r"requests 1 node .*, but .* wide requires at least 2 per job \(MinNodes\)"),
        (
            {"partition": "wide", "nodes": 2, "mem": "2G"},
            r"2048 MiB of memory .* \(--mem\).* 1000 \(MaxMemPerNode\)",
        ),
        ({"partition": "wide", "nodes": 2, "cpus_per_task": 5}, r"5 CPUs per node .* 4 \(MaxCPUsPerNode\)"),
        ({"partition": "short", "nodes": 2}, r"requests 2 nodes .* allows at most 1 \(MaxNodes\)"),
        ({"partition": "short,wide", "time": "60"}, r"MaxTime(?s:.*)MinNodes"),
    ],
)
def test_job_that_would_wait_forever_is_refused_with_a_remedy(submission, options, message):
    with pytest.raises(SpecError, match=message):
        submission(**options)


@pytest.mark.parametrize(
    ("options", "reason", "remedy"),
    [
        ({"partition": "shrt"}, "Invalid partition", r"'shrt' \(--partition\)\. Did you mean 'short'\?"),
        ({"nodes": 3}, "node configuration", "requests 3 nodes, .*has 2 nodes with 8 CPUs, .*2 a100 GPUs"),
        ({"gpus_per_node": 3}, "node configuration", "each with 3 GPUs, 3 CPUs.*has 2 nodes .* 2 a100 GPUs"),
        ({"gpus_per_node": "h100:1"}, "node configuration", "1 h100 GPU, .*2 a100 GPUs"),
        ({"mem": TOO_MUCH}, "node configuration", "MiB of memory"),
        ({"constraint": "fast", "nodes": 2}, "node configuration", "and the features fast"),
        ({"constraint": "fst"}, "Invalid feature", r"features of the nodes \(--constraint\): fast\."),
        ({"nodelist": "nowhere-1"}, "Invalid node name", "Correct --nodelist"),
        ({"array": "0-21"}, "Invalid job array", r"highest task number at this site is 20 \(MaxArraySize\)"),
        ({"partition": "reserved"}, "Access/permission", "require a --reservation.*requires a reservation"),
        ({"partition": "drained"}, "inactive or drain", "Choose another --partition, or wait"),
        ({"reservation": "nope"}, "reservation is invalid", "`scontrol show reservation` lists them"),
    ],
)
def test_refusal_of_slurm_has_a_remedy(submission, options, reason, remedy):
    job = submission(**options)
    assert re.search(rf"(?s)sbatch failed: .*{reason}.*{remedy}", job.preflight.refusal())
    assert job.forecast[0].startswith("No estimated start: sbatch failed: ")
    with pytest.raises(SchedulerError, match=rf"The job was not submitted: .*{reason}"):
        submit_prepared(job)
    assert not os.path.exists(job.spec.run_dir)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--cpus-per-task=64", "requests --cpus-per-task=64. Partition"),
        ("-n 100 --gres=gpu:h100:1", "requests --ntasks=100 --gres=gpu:h100:1. .* 2 a100 GPUs"),
        ("-G 20", r"requests --gpus=20. .*\(--gpus comes from .*job.sbatch:3"),
        ("--mem-per-cpu=20G -c4 -N2", "requests --mem-per-cpu=20G --cpus-per-task=4 --nodes=2. Partition"),
        ("--ntask-per-node=2", r"Did you mean '--ntasks-per-node'\? \(--ntask-per-node comes .*sbatch:3"),
    ],
)
def test_refusal_names_the_options_of_a_batch_script(submission, tmp_path, line, message):
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\n\n#SBATCH {line}\nsrun true\n")
    assert re.search(message, submission(script="job.sbatch").preflight.refusal())


def test_range_of_nodes_of_a_batch_script_may_begin_below_the_minimum(submission, tmp_path):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1-2\nsrun true\n")
    assert submission(script="job.sbatch", partition="wide").preflight.refusal() == ""


def test_refusal_names_the_requested_nodes(submission):
    node = f"strict-{os.getpid()}-1"
    refusal = submission(nodelist=node, gpus_per_node=3).preflight.refusal()
    assert f"requests 1 node, each with 3 GPUs, 3 CPUs, on {node}" in " ".join(refusal.split())


def test_refused_resubmission_leaves_the_run_folder_unchanged(submission):
    run, _ = submit_prepared(submission())
    try:
        before = {path: path.read_text() for path in (run.dir.spec, run.dir.job_script)}
        run.cancel()
        wait_for(lambda: run.status().state.ended, 30, "the end of the run")
        with pytest.raises(SchedulerError, match="not submitted"):
            submit_prepared(submission(run_dir=run.dir.path, nodes=3))
        assert {path: path.read_text() for path in before} == before
    finally:
        run.cancel()


def test_sbatch_variable_is_named_as_source(submission):
    assert "'shrt' (SBATCH_PARTITION)" in submission(env={"SBATCH_PARTITION": "shrt"}).preflight.refusal()
    with pytest.raises(SpecError, match=r"01:00:00 was requested \(--time\).*--time comes from SBATCH_T"):
        submission(env={"SBATCH_TIMELIMIT": "60"}, partition="short", time=None)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "short"},
        {"partition": "short,wide", "nodes": 2, "time": "60"},
        {"partition": "physics", "account": "physics"},
        {"nodes": 2, "gpus_per_node": "a100:2", "cpus_per_task": 4},
        {"constraint": "fast"},
        {"array": "0-20%3"},
        {"mem_per_gpu": "1G", "gpus_per_node": 1},
    ],
)
def test_possible_job_is_not_refused(submission, options):
    job = submission(**options)
    assert job.preflight.refusal() == ""
    start, cost = job.forecast
    assert start.startswith("Estimated start: now, on strict-")
    assert "Maximum cost:" in cost


def test_forecast_has_start_and_cost(submission):
    assert submission(nodes=2, gpus_per_node=2, time="90").forecast == (
        f"Estimated start: now, on strict-{os.getpid()}-[1-2], partition preemptible.",
        "Maximum cost: 6 GPU-hours (2 nodes × 2 GPUs × 01:30:00) per allocation.",
    )
    assert submission(time=None).forecast[1] == (
        "No cost estimate (1 node × 1 CPU): neither --time nor partition preemptible sets a time limit."
    )
    assert (
        "1 GPU-hour (2 tasks × 1 node × 1 GPU × 00:30:00)"
        in (submission(array="0,5", gpus_per_node=1, time="30").forecast[1])
    )
    # A job with whole nodes pays for all of their GPUs.
    assert (
        "2 GPU-hours (1 node × 2 GPUs"
        in submission(partition="whole", gpus_per_node=1, time="60").forecast[1]
    )
    assert (
        "2 GPU-hours (1 node × 2 GPUs" in submission(exclusive=True, gpus_per_node=1, time="60").forecast[1]
    )


def test_requeue_rules_of_the_site_are_noted(submission):
    requeue, preempted = submission().notes
    assert "(JobRequeue=0)" in requeue
    assert "is cancelled immediately, not requeued (PreemptMode=CANCEL, GraceTime=0)" in preempted
    assert "has 30 s to save (KillWait), and then continues in a successor job" in preempted
    assert submission(partition="urgent").notes == (requeue,)
    assert submission(resume_mode="successor").notes == (preempted,)


def test_few_cpus_are_warned_of_and_the_default_time_is_noted(submission):
    notes = submission(partition="thin", time=None, gpus_per_node=2).notes
    assert notes[0] == (
        "Warning: each rank gets only 1 of the 8 CPUs of a node in partition thin (--cpus-per-task), so data "
        "workers compete with training."
    )
    assert "Without --time, the job has a time limit of 00:10:00 (default of partition thin)." in notes
    assert not any(note.startswith("Without") for note in submission(partition="thin", cpus_per_task=1).notes)


@pytest.mark.parametrize(
    ("partition", "site", "memory"),
    [
        ("DefMemPerCPU=100", {"def_mem_per_node_mib": 7}, "400 MiB of memory per node"),
        ("DefMemPerNode=300", {"def_mem_per_cpu_mib": 7}, "300 MiB of memory per node"),
        ("", {"def_mem_per_cpu_mib": 7}, "28 MiB of memory per node"),
        ("", {}, "all memory of its nodes"),
    ],
)
def test_default_memory_is_noted(request_of, partition, site, memory):
    parsed = parse_partition(f"PartitionName=p State=UP MaxTime=60 {partition}")
    settings = SlurmConfig(hands_out_memory=True, job_requeue=True, **site)
    facts = Site(slurm=settings, partitions=(replace(parsed, default=True),))

    def notes(**fields):
        return check_request(request_of(ntasks_per_node=2, cpus_per_task=2, **fields), facts, lambda _: "")[0]

    limits = f"a time limit of 01:00:00 and {memory} (default of partition p)."
    assert notes() == [f"Without --time and --mem, the job has {limits}"]
    assert notes(time_limit_s=600.0, directives={"mem-per-gpu": "1G"}) == []
    # The number of CPUs of a batch script is unknown.
    (note,) = notes(program="batch")
    assert ("MiB of memory per CPU" in note) is ("per node" in memory and "300" not in memory)


def test_down_partition_is_noted(submission):
    broken = submission(partition="broken")
    assert broken.notes[-1] == "Partition broken is down. The job will wait until the partition is up again."
    assert [line for line in broken.forecast if "start" in line] == []


def test_job_that_waits_for_unavailable_nodes_is_not_refused(submission, strict_cluster):
    node = f"NodeName={strict_cluster.nodes[1]}"
    run_command(["scontrol", "update", node, "State=DRAIN", "Reason=test"], strict_cluster.env)
    try:
        assert submission(nodes=2).preflight.refusal() == ""
    finally:
        run_command(["scontrol", "update", node, "State=RESUME"], strict_cluster.env)


def test_site_that_rejects_memory_and_demands_time(submission, tmp_path):
    profile = tmp_path / "site.yaml"
    profile.write_text("site: {habits: {memory_option: refused, needs_time: true, requeue: false}}\n")
    env = {"HPCTRAIN_SITE_CONFIG": str(profile)}
    with pytest.raises(SpecError, match=r"Memory was requested \(--mem-per-cpu\), but this site rejects"):
        submission(env=env, mem_per_cpu="1G")
    with pytest.raises(SpecError, match=r"Memory was requested \(SBATCH_MEM_PER_NODE\)"):
        submission(env={**env, "SBATCH_MEM_PER_NODE": "1G"})
    with pytest.raises(SpecError, match=r"rejects jobs without a time limit .* Use --time"):
        submission(env=env, time=None)
    chained, ending = (submission(env=env, resume_mode=mode).notes[0] for mode in ("auto", "requeue"))
    assert chained.startswith("This site does not requeue jobs")
    assert "continues in a successor job" in chained
    assert "saves its state and exits. Submit the run again" in ending


def test_limit_that_a_qos_may_lift_is_a_note(accounting, make_spec):
    environ = environment(accounting.env)
    run_command(["sacctmgr", "-i", "add", "qos", "lifted", "Flags=PartitionTimeLimit"], accounting.env)
    try:
        site, _ = SlurmBackend(environ).site_with_gaps(SiteConventions())
        short = replace(site.partition("urgent"), default=True, max_time_s=600.0)
        request = JobRequest.from_spec(
            make_spec(time_limit_s=3600.0, directives={"partition": "urgent"}), environ
        )
        query = partial(run_slurm, environ=environ)
        limited = replace(site, partitions=(short,))
        with pytest.raises(SpecError, match=r"allows at most 00:10:00 \(MaxTime\)"):
            check_request(request, limited, query)
        enforcing = replace(site.slurm, enforced=("associations", "limits", "qos"))
        (note,), _ = check_request(request, replace(limited, slurm=enforcing), query)
        assert note.endswith(
            "This limit does not apply if the job's QOS is lifted (QOS flag PartitionTimeLimit)."
        )
    finally:
        run_command(["sacctmgr", "-i", "delete", "qos", "lifted"], accounting.env)


def test_node_local_files_are_noted(make_spec):
    spec = make_spec(script="/tmp/train.py", python="/tmp/venv/bin/python")
    (warning,) = path_notes(spec, lambda command: "n1\nn2\n")
    assert warning.startswith(
        "The script '/tmp/train.py' and the interpreter '/tmp/venv/bin/python' are in a node-local folder"
    )
    # If this is the only machine, there is no problem.
    assert path_notes(spec, lambda command: f"{socket.gethostname().partition('.')[0]}\n") == []
    assert path_notes(make_spec(), lambda command: "n1\n") == []


def test_submission_makes_few_slurm_queries_with_fake_slurm(fake_slurm, prepared):
    submit_prepared(prepared(backend="slurm", environ=fake_slurm.environ))
    # Nodes and partitions, which also show that Slurm answers; the nodes' hosts, because the script is in
    # /tmp. The fake does not record queries for its configuration.
    queries = ["sinfo", "scontrol", "sinfo"]
    assert sorted(fake_slurm.calls) == sorted([*queries, "sbatch", "sbatch"])


@pytest.fixture
def request_of(make_spec):
    return lambda **fields: JobRequest.from_spec(make_spec(**fields), {})


@pytest.mark.parametrize(
    ("output", "error", "sentence"),
    [
        (
            "sbatch: Job 4 to start at 2020-01-01T00:00:00 a using 1 processors on nodes n1 in partition p\n",
            "",
            "Estimated start: now, on n1, partition p.",
        ),
        # Slurm predicts a start in centuries.
        (
            "sbatch: Job 7 to start at 2282-02-06T05:56:00 using 2 processors on nodes n1 in partition gpu",
            "",
            "No estimated start: according to Slurm, the job waits for jobs without a time limit.",
        ),
        ("", "", "No estimated start: sbatch printed nothing."),
        ("a\n b", "", "No estimated start: a b."),
        ("", "sbatch not found on PATH", "No estimated start: sbatch not found on PATH."),
    ],
    ids=["Slurm 26.05", "jobs without a limit", "nothing", "unknown", "error"],
)
def test_forecast_is_parsed(output, error, sentence):
    assert describe_start({}, output, error) == sentence


def test_forecast_shows_the_year_and_no_start_after_a_year():
    soon, late = (datetime.now() + timedelta(days=days) for days in (300, 366))
    answer = "sbatch: Job 4 to start at {:%Y-%m-%dT%H:%M:%S} using 1 processors on nodes n1 in partition p\n"
    assert describe_start({}, answer.format(soon)) == (
        f"Estimated start: {soon:%Y-%m-%d %H:%M}, on n1, partition p."
    )
    assert describe_start({}, answer.format(late)).startswith("No estimated start: according to")


def test_unknown_cpus_are_noted(fake_slurm, prepared):
    submission = prepared(backend="slurm", environ=fake_slurm.environ, gpus_per_node=2)
    assert submission.notes[0].startswith("The CPUs of the nodes are unknown, so each rank gets Slurm's def")
    assert submission.spec.cpus_per_task is None


def test_limit_in_a_rejection_is_explained(request_of):
    words = "QOSMaxSubmitJobPerUserLimit; Batch job submission failed: Job violates accounting/QOS policy"
    assert explain_refusal(words, request_of(), Site()) == (
        f"{words}. There are as many submitted jobs as the QOS allows (each array task counts as a job); "
        "`sacctmgr show qos` lists the limits. Wait until other jobs have ended, or use another --qos or "
        "--account."
    )
    assert explain_refusal("x", request_of(), Site()) == "x. Correct the options, then try again."
    unknown = "sbatch: unrecognized option '--stepmgr'"
    assert explain_refusal(unknown, request_of(), Site()).endswith("does not have the option. Remove it.")
    assert "format=qos` lists yours" in explain_refusal("Invalid qos specification", request_of(), Site())
