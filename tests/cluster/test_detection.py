"""`detect` with the variables of every launcher, and on the recordings of `scripts/record_launches.py`."""

import json

import pytest
from helpers.launch_runner import RECORDINGS, check_detection, load_recording
from helpers.launches import ALL, SLURM
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.slurm_ranks import parse_tasks_per_node
from hpctrain.errors import EnvironmentMismatch


def variables(name: str, number: int = 0) -> dict[str, str]:
    """Variables of one process of a recorded launch."""
    return dict(load_recording(name)[number].variables)


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(EnvironmentMismatch) as caught:
        detect(environ)
    return str(caught.value)


#: Rank 5 of 7, the second of three on the second of two nodes.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}
MARKED = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}


# Nodes and tasks


def test_world_size_is_that_of_the_step_not_of_the_job():
    ranks = detect({**STEP, "SLURM_NTASKS": "99", "SLURM_NPROCS": "99", "SLURM_NTASKS_PER_NODE": "2"})
    assert (ranks.world_size, ranks.local_world_size) == (7, 3)


@pytest.mark.parametrize(
    ("nodes", "node", "first_node"),
    [
        ("linux[1-2]", "linux2", "linux1"),  # the root node must not become `linux[1`
        ("alpha,beta", "beta", "alpha"),
        ("gpu-a[01-02]", "gpu-a02", "gpu-a01"),
        ("n1,gpu-b[7]", "gpu-b7", "n1"),
        ("rack[1-2]n3x", "rack2n3x", "rack1n3x"),
    ],
)
def test_first_node_of_any_node_list_is_the_master(nodes, node, first_node):
    ranks = detect({**STEP, "SLURM_STEP_NODELIST": nodes, "SLURMD_NODENAME": node})
    assert (ranks.master_addr, ranks.local_world_size) == (first_node, 3)


@pytest.mark.parametrize(
    "text",
    [*("", "4(x)", "x2", "4(x2),", "4;3", "-1"), "2(x99999999999999999999)", "2(x9999999999)", "9" * 5000],
)
def test_malformed_tasks_per_node_is_refused(text):
    with pytest.raises(EnvironmentMismatch, match=r"4\(x2\),3"):
        parse_tasks_per_node(text)


def test_host_file_without_master_addr_is_refused():
    environ = variables("srun-arbitrary")
    assert "SLURM_HOSTFILE" in refusal(environ)
    ranks = detect({**environ, "MASTER_ADDR": "rec-3"})
    assert (ranks.master_addr, ranks.rank, ranks.node_rank) == ("rec-3", 0, 2)


# Rendezvous address and port


def test_ranks_of_a_step_share_rendezvous_and_other_steps_do_not():
    ranks = detect(STEP)
    peer = detect(
        {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    )
    assert (ranks.master_addr, ranks.master_port) == (peer.master_addr, peer.master_port)
    assert ranks.rendezvous_id == peer.rendezvous_id
    changes = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"}
    changes |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_CLUSTER_NAME": "other"}
    steps = [ranks, *(detect({**STEP, name: value}) for name, value in changes.items())]
    assert len({step.rendezvous_id for step in steps}) == len({step.master_port for step in steps}) == 6
    assert all(20_000 <= step.master_port < 32_000 for step in steps)


def test_given_master_address_and_port_are_used():
    ranks = detect({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (ranks.master_addr, ranks.master_port) == ("10.0.0.1", 1234)
    assert (ranks.sources["master_addr"], ranks.sources["master_port"]) == ("MASTER_ADDR", "MASTER_PORT")


# Outside of a step


@pytest.mark.parametrize("name", ["batch-script", "salloc-shell", "ssh-session-with-leftovers", "nothing"])
def test_process_outside_a_step_is_a_single_local_rank(name):
    ranks = detect(variables(name))
    assert (ranks.environment, ranks.rank, ranks.world_size) == ("local", 0, 1)


def test_interactive_shell_with_several_tasks_is_refused_but_its_steps_are_not():
    text = refusal(variables("interactive-shell-of-several-tasks"))
    assert "2 tasks" in text
    assert "HPCTRAIN_ENVIRONMENT=local" in text
    forced = {**variables("interactive-shell-of-several-tasks"), ENVIRONMENT_VARIABLE: "slurm"}
    assert detect(forced).world_size == 2
    assert detect(variables("srun-in-an-interactive-shell", 2)).rank == 2


def test_batch_script_submitted_from_a_step_is_not_a_rank_of_it():
    job = variables("srun-in-sbatch")
    assert (job["ENVIRONMENT"], detect(job).rank) == ("BATCH", 0)
    del job["SLURM_UMASK"]
    assert "inherited the variables SLURM_STEP_*" in refusal(job)
    assert detect({**job, ENVIRONMENT_VARIABLE: "slurm"}).rank == 0
    assert detect({**job, ENVIRONMENT_VARIABLE: "local"}).world_size == 1
    # Started by hpctrain without srun, in a batch script.
    assert detect({**STEP, "ENVIRONMENT": "BATCH"}).rank == 5


# RANK and similar variables from another source


@pytest.mark.parametrize(
    ("variable", "value", "detected"),
    [
        ("RANK", "0", "rank is 5 (SLURM_PROCID)"),
        ("WORLD_SIZE", "8", "world size is 7 (SLURM_STEP_NUM_TASKS)"),
        ("LOCAL_RANK", "0", "local rank is 1 (SLURM_LOCALID)"),
        ("LOCAL_WORLD_SIZE", "4", "local world size is 3 (SLURM_STEP_TASKS_PER_NODE)"),
        ("NODE_RANK", "0", "node rank is 1 (SLURM_NODEID)"),  # an unescaped $SLURM_NODEID in a batch script
        ("GROUP_RANK", "0", "node rank is 1 (SLURM_NODEID)"),
        ("PMI_SIZE", "4", "world size is 7 (SLURM_STEP_NUM_TASKS)"),
    ],
)
def test_contradictory_variable_is_refused_until_environment_is_forced(variable, value, detected):
    text = refusal({**STEP, variable: value})
    assert f"{variable} is {value}, but the {detected}" in text
    assert "HPCTRAIN_ENVIRONMENT=slurm" in text
    assert detect({**STEP, variable: value, ENVIRONMENT_VARIABLE: "slurm"}).rank == 5


def test_batch_script_with_world_size_but_without_srun_is_refused():
    torch_variables = {"WORLD_SIZE": "8", "MASTER_ADDR": "rec-1", "MASTER_PORT": "29500"}
    text = refusal(variables("batch-script") | torch_variables)
    assert "WORLD_SIZE is 8, but the world size is 1" in text


def test_manual_torch_variables_must_name_the_node_unless_it_is_the_only_one():
    manual = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    ranks = detect({**manual, "MASTER_ADDR": "localhost"})
    assert (ranks.local_world_size, ranks.node_rank, ranks.num_nodes) == (2, 0, 1)
    assert "LOCAL_WORLD_SIZE" in refusal({**manual, "MASTER_ADDR": "n1"})
    assert "NODE_RANK" in refusal({**manual, "MASTER_ADDR": "n1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def test_torch_variables_of_ranks_detect_to_the_same_ranks():
    others = variables("openmpi-three-hosts", 2), variables("mpich", 1), variables("horovodrun", 2)
    for environ in (STEP, *others):
        ranks = detect(environ)
        assert detect({**environ, **ranks.torch_variables()}) == ranks


# Nested launchers


def test_innermost_launcher_wins():
    assert detect({**STEP, **MARKED}).environment == "torchrun"
    assert detect(variables("openmpi-in-salloc")).environment == "openmpi"
    assert detect(variables("mpich-in-salloc")).environment == "mpich"
    shell = {**variables("srun-one-task"), **variables("openmpi", 2)}
    assert (detect(shell).environment, detect(shell).rank) == ("openmpi", 2)


def test_separate_torchrun_in_each_task_is_refused():
    text = refusal(variables("torchrun-alone-in-each-task", 1))
    assert "torchrun started rank 0 of 1 (RANK, WORLD_SIZE) with all ranks on this host" in text
    assert "of 2 started by slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)" in text


@pytest.mark.parametrize("variable", ["PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK"])
def test_rank_of_unknown_launcher_is_refused(variable):
    text = refusal({variable: "3"})
    assert f"{variable} is 3, but the rank is 0" in text
    assert "Configure the launcher to set RANK, WORLD_SIZE, LOCAL_RANK" in text
    assert "HPCTRAIN_ENVIRONMENT=torchrun" not in text
    assert detect({variable: "3", **TORCHRUN}).rank == 3
    assert detect({variable: "3", ENVIRONMENT_VARIABLE: "local"}).world_size == 1


def test_srun_inside_a_rank_of_another_launcher_is_refused():
    for name in ("torchrun", "openmpi", "mpich", "submitit-local", "horovodrun"):
        text = refusal({**variables(name, 1), **STEP})
        assert "inside process 5 of 7 started by slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)" in text
        assert "HPCTRAIN_ENVIRONMENT=slurm" in text


# HPCTRAIN_ENVIRONMENT


def test_unknown_environment_gets_a_suggestion():
    for name in ("slrum", "SLURM"):
        assert "Did you mean 'slurm'?" in refusal({ENVIRONMENT_VARIABLE: name})
    assert "Choose from torchrun, horovod, openmpi" in refusal({ENVIRONMENT_VARIABLE: "xyz"})
    assert "are not set" in refusal({ENVIRONMENT_VARIABLE: "torchrun"})


# Contradictions within one environment


@pytest.mark.parametrize(
    ("launch", "change", "expected"),
    [
        ("step", {"SLURM_STEP_NUM_TASKS": "8"}, ["8 (SLURM_STEP_NUM_TASKS)", "TASKS_PER_NODE=4,3"]),
        ("step", {"SLURM_STEP_NODELIST": "n[1-3]"}, ["3 nodes", "SLURM_STEP_NODELIST=n[1-3]", "for 2"]),
        ("step", {"SLURM_LOCALID": "3"}, ["local_rank 3", "SLURM_LOCALID", "local_world_size 3"]),
        ("step", {"SLURM_PROCID": "x"}, ["SLURM_PROCID", "'x'"]),
        ("step", {"SLURM_PROCID": "7"}, ["rank 7", "SLURM_PROCID", "world_size 7"]),
        ("step", {"SLURM_STEP_ID": ""}, ["rank is 5 (SLURM_PROCID)"]),
        ("step", {"SLURM_NODEID": "2"}, ["node rank is 2 (SLURM_NODEID)", "2 nodes"]),
        ("step", {"SLURM_GTIDS": "0,1,2,3"}, ["Rank 5 (SLURM_PROCID)", "SLURM_GTIDS=0,1,2,3"]),
        ("step", {"SLURM_GTIDS": "4,5"}, ["n2 has 3 tasks", "2 according to SLURM_GTIDS=4,5"]),
        ("step", {"SLURMD_NODENAME": "n7"}, ["'n7'", "SLURM_STEP_NODELIST=n[1-2]"]),
        ("step", {"SLURM_NODEID": "0"}, ["rank 5 is on n2 (SLURMD_NODENAME), node 0", "MASTER_ADDR"]),
        ("step", {"SLURM_STEP_NODELIST": ""}, ["NODELIST is not set", "HPCTRAIN_ENVIRONMENT=local"]),
        ("step", {"SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST: ", "'n[1-'"]),
        ("torchrun", {"LOCAL_WORLD_SIZE": "5"}, ["local_world_size 5", "world_size 4"]),
        ("torchrun", {"GROUP_RANK": "2"}, ["node_rank 2", "GROUP_RANK", "num_nodes 2"]),
        ("torchrun", {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, ["num_nodes 1", "local_world_size 2"]),
        ("torchrun", {"LOCAL_WORLD_SIZE": "0"}, ["local_rank 1", "local_world_size 0"]),
        ("torchrun", {"MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ("torchrun", {"MASTER_PORT": "99999"}, ["MASTER_PORT is 99999", "between 1 and 65535"]),
        ("torchrun", {"MASTER_PORT": "0"}, ["port is 0 (MASTER_PORT)", "world size is 4 (WORLD_SIZE)"]),
        ("openmpi", {"OMPI_COMM_WORLD_SIZE": "4"}, ["4 (OMPI_COMM_WORLD_SIZE)", "number of processes is 3"]),
        ("openmpi", {"OMPI_COMM_WORLD_RANK": "3"}, ["rank 3", "OMPI_COMM_WORLD_RANK", "world_size 3"]),
        ("openmpi", {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, ["OMPI_COMM_WORLD_LOCAL_SIZE is not set"]),
        ("openmpi-three-hosts", {"OMPI_MCA_orte_num_nodes": "9"}, ["num_nodes 9", "OMPI_MCA_orte_num_nodes"]),
        ("mpich", {"MPI_LOCALRANKID": "3"}, ["local_rank 3", "MPI_LOCALRANKID", "local_world_size 3"]),
        ("mpich", {"PMI_SIZE": "2"}, ["do not determine the rank of this node"]),
        ("horovodrun", {"HOROVOD_LOCAL_RANK": "x"}, ["HOROVOD_LOCAL_RANK", "'x'"]),
        ("submitit-local", {"SUBMITIT_LOCAL_GLOBALID": "5"}, ["rank 5", "SUBMITIT_LOCAL_GLOBALID"]),
    ],
)
def test_contradictory_variables_are_refused_with_both_values(launch, change, expected):
    environ = {"step": STEP, "torchrun": MARKED}.get(launch) or variables(launch)
    text = refusal({**environ, **change})
    assert [part for part in expected if part not in text] == []


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"]
)
def test_incomplete_launcher_variables_are_refused(name):
    assert "not set, although other variables" in refusal({name: "3"})


# Recorded launches


#: Of a newer Slurm, whose batch scripts and interactive shells have negative step ids.
NEWER = "slurm-26.05"


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(RECORDINGS).with_suffix("")) for path in RECORDINGS.rglob("*.json"))
)
def test_recorded_ranks_are_detected(name):
    check_detection(ALL[name.rpartition("/")[2]], load_recording(name))


def test_every_launch_has_a_recording():
    documents = {path: json.loads(path.read_text()) for path in RECORDINGS.rglob("*.json")}
    assert {path.stem for path in RECORDINGS.glob("*.json")} == ALL.keys()
    assert {path.stem for path in RECORDINGS.glob(f"{NEWER}/*.json")} >= {launch.name for launch in SLURM}
    for path, document in documents.items():
        assert document["launch"] == path.stem
        assert document["command"].endswith(ALL[path.stem].command), "record it again"


def detect_or_none(variables: dict[str, str]) -> Ranks | None:
    try:
        return detect(variables)
    except EnvironmentMismatch:
        return None


NO_STEPS = ["batch-script", "array-batch-script", "het-batch-script", "salloc-shell"]
NO_STEPS += ["salloc-interactive-step"]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*NO_STEPS, "ssh-session-with-leftovers", *(f"{NEWER}/{name}" for name in NO_STEPS)]
)
@settings(deadline=None)
@given(data=st.data())
def test_session_with_some_allocation_variables_is_a_single_process(name, data):
    (process,) = load_recording(name)
    kept = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = detect_or_none({variable: process.variables[variable] for variable in kept})
    assert ranks is None or (ranks.environment, ranks.world_size) == ("local", 1)


STEPS = ["srun-uneven", "srun-on-a-part-of-the-nodes", "het-job-unsorted", "array", "srun-pmi2"]


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None)
@given(data=st.data())
def test_step_with_lost_variables_is_detected_or_refused_but_never_wrong(name, data):
    process = data.draw(st.sampled_from(load_recording(name)))
    lost = data.draw(st.sets(st.sampled_from(sorted(process.variables))))
    ranks = detect_or_none({k: v for k, v in process.variables.items() if k not in lost})
    if ranks is None:
        return
    if ranks.environment == "local":
        # Without its rank, a process looks like a session; with rank 0, like a batch script.
        assert "SLURM_PROCID" in lost or process.truth["rank"] == 0
        return
    detected = {field: getattr(ranks, field) for field in process.truth if hasattr(ranks, field)}
    assert detected == {field: process.truth[field] for field in detected}
    assert ranks.master_addr == process.truth["main_host"]
