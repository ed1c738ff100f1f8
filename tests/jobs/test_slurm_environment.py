import json
from pathlib import Path

import pytest

from hpctrain.slurm.environment import apply_env_defaults, sbatch_env, strip_job_env

RECORDINGS = Path(__file__).parents[1] / "cluster" / "recordings"

USERS = {
    "PATH": "/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CLUSTERS": "a",
    "SLURM_JWT": "token",
    "SBATCH_ACCOUNT": "mine",
    "SALLOC_ACCOUNT": "mine",
    "OMP_NUM_THREADS": "4",
    "HPCTRAIN_SHARE_GPUS": "1",
}

#: Variables around a submission. The recordings have those of other launchers.
CONTEXTS = {
    "a rank of hpctrain": {
        "HPCTRAIN_RUN_DIR": "/other",
        "HPCTRAIN_ATTEMPT": "3",
        "HPCTRAIN_LIFELINE_FD": "5",
        "HPCTRAIN_COMMAND": "{}",
        "HPCTRAIN_MAX_MICRO_BATCH": "4",
        "HPCTRAIN_VERIFIED_STEP": "100",
        "HPCTRAIN_VERIFY_STEPS": "5,10",
        "HPCTRAIN_VERIFY_SYNC_STEPS": "5",
        "HPCTRAIN_STAGE": "/tmp/stage",
        "HPCTRAIN_CPU_BINDING": "none",
        "HPCTRAIN_STOP_GRACE": "SIGTERM=30",
        "HPCTRAIN_INDEPENDENT_RANKS": "1",
        "RANK": "3",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "an allocation": {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_TRES_PER_TASK": "cpu:1",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_MEM_BIND": "local",
        "SBATCH_MEM_BIND_TYPE": "local",
        "SPANK__SLURM_SPANK_OPTION_x": "1",
        "_SLURM_SPANK_OPTION_pyxis_container_image": "x",
    },
    "leftovers of a step": {"SLURM_CPU_BIND": "mask", "SLURM_STEP_ID": "0"},
    "formats": {
        "SQUEUE_FORMAT": "%i",
        "SINFO_FORMAT": "%i",
        "SACCT_FORMAT": "x",
        "SLURM_TIME_FORMAT": "relative",
    },
}


def test_sbatch_clusters_applies_to_all_commands():
    assert strip_job_env({"SBATCH_CLUSTERS": "west"}) == {"SLURM_CLUSTERS": "west"}
    both = {"SBATCH_CLUSTERS": "west", "SLURM_CLUSTERS": "east"}
    assert sbatch_env(both, {}) == {"SLURM_CLUSTERS": "east"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_variables_around_the_submission_are_removed(context):
    environ = {**USERS, **CONTEXTS[context]}
    assert strip_job_env(environ) == USERS
    assert sbatch_env(environ, {"account": "mine"}) == USERS


#: The same in every job. Newer versions rename the bootstrap variables of mpirun.
OF_EVERY_JOB = {
    "ENVIRONMENT",
    "HYDRA_BOOTSTRAP",
    "HYDRA_LAUNCHER_EXTRA_ARGS",
    "I_MPI_HYDRA_BOOTSTRAP",
    "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
    "OMPI_MCA_plm_slurm_args",
    "PRTE_MCA_plm_slurm_args",
}


@pytest.mark.parametrize(
    "recording",
    sorted(RECORDINGS.rglob("*.json")),
    ids=lambda path: str(path.relative_to(RECORDINGS).with_suffix("")),
)
def test_recorded_launcher_variables_are_removed(recording):
    """Only variables of the shell, the user and every batch script remain."""
    document = json.loads(recording.read_text())
    for process in document["processes"]:
        remaining = sbatch_env({**document["common"], **process["own"]}, {})
        assert remaining.keys() <= {"PWD", "SLURM_CONF", "CUDA_VISIBLE_DEVICES", *OF_EVERY_JOB}


@pytest.mark.parametrize(
    "settings",
    [
        {"OMPI_MCA_btl": "tcp,self", "OMPI_ALLOW_RUN_AS_ROOT": "1"},
        {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"},
        {"HOROVOD_TIMELINE": "t.json"},
        {"MPIR_CVAR_CH4_NETMOD": "ofi"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"SBATCH_MEM_BIND": "local"},
    ],
)
def test_settings_of_the_user_are_kept(settings):
    environ = {**USERS, **settings}
    assert sbatch_env(environ, {"account": "mine", "mem-bind": "local"}) == environ


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES"])
def test_gpus_of_the_outer_job_are_kept_only_for_local_processes(name):
    environ = {"SLURM_JOB_ID": "1", name: "2,3"}
    assert sbatch_env(environ, {}) == {}
    assert strip_job_env(environ) == {name: "2,3"}


def test_defaults_set_by_hpctrain_are_removed():
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert strip_job_env(apply_env_defaults({"PATH": "/bin"}, defaults)) == {"PATH": "/bin"}
    assert strip_job_env(apply_env_defaults(USERS, defaults)) == USERS
    twice = apply_env_defaults(apply_env_defaults({}, {"OMP_NUM_THREADS": "1"}), {"GLOO_SOCKET_IFNAME": "lo"})
    assert strip_job_env(twice) == {}


def test_directives_override_sbatch_variables():
    environ = {
        "SBATCH_PARTITION": "old",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_ERROR": "elsewhere",
        "SBATCH_INPUT": "nowhere",
        "SBATCH_CPUS_PER_GPU": "9",
        "SBATCH_ACCOUNT": "mine",
    }
    directives = {"partition": "new", "time": "00:10:00", "account": "mine"}
    assert sbatch_env(environ, directives) == {"SBATCH_ACCOUNT": "mine"}
    assert sbatch_env(environ, {}) == {}
