"""A run is disturbed on clusters with settings of larger sites, with each Slurm version."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.slurm_versions import SLURM_VERSIONS, new_cluster
from helpers.training_runs import check_preempted_run_continues, submit
from helpers.unprivileged_user import UnprivilegedUser
from helpers.waiting import wait_for

from hpctrain.cluster.processes import processes
from hpctrain.sandbox import Sandbox

INSTALLED = ""
ALL_VERSIONS = (INSTALLED, *SLURM_VERSIONS)
SHAPE = ["--nodes", "2", "--gpus-per-node", "1"]

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


def cluster_of(version: str, settings: list[str], cpus: int = 8) -> AbstractContextManager[Sandbox]:
    size = {"nodes": 2, "gpus_per_node": 2, "cpus_per_node": cpus}
    return new_cluster("pytest-s", settings=["KillWait=5", *settings], slurm=version, **size)


@pytest.mark.parametrize("version", SLURM_VERSIONS)
def test_steps_managed_by_the_job(version, tmp_path):
    """A process of the job, instead of the controller, creates its steps (since 24.05)."""
    settings = ["SlurmctldParameters=enable_stepmgr", "PrologFlags=Contain"]
    with cluster_of(version, settings) as cluster:
        run = submit(tmp_path / "run", cluster.env, SHAPE, step_s=0.1)
        run.wait_for_step(2)
        job = run.events("submitted")[0]["job_id"]
        assert "StepMgrEnabled=Yes" in run_command(["scontrol", "show", "job", job], cluster.env).stdout
        run.kill_rank(1)
        assert run.wait() == 0
        assert (len(run.events("restart")), run.events("requeue")) == (1, [])
        assert_no_process_left(run.path)


@pytest.mark.parametrize("version", SLURM_VERSIONS)
def test_rate_limit_of_a_user(version):
    """The controller postpones the RPCs of a user beyond a rate (since 23.02). Root is exempt."""
    rates = "rl_enable,rl_bucket_size=8,rl_refill_rate=2,rl_refill_period=1"
    with UnprivilegedUser() as user, cluster_of(version, [f"SlurmctldParameters={rates}"]) as cluster:
        run = submit(user.home / "run", cluster.env, SHAPE, step_s=0.1, call=user.call_hpctrain)
        check_preempted_run_continues(run, cluster)
        assert "cannot" not in run.dir.supervisor_log.read_text()
        burst = "for i in $(seq 20); do scontrol show config >/dev/null || echo refused & done; wait"
        assert "refused" in user.run(["sh", "-c", burst], cluster.env).stdout


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_devices_cores_and_memory_constrained_by_control_groups(version, tmp_path):
    """A job can open only its own GPUs, and a rank runs on its own core."""
    groups = Path("/sys/fs/cgroup/devices")
    if not (groups / "tasks").exists() or not os.access(groups, os.W_OK):
        pytest.skip(f"needs control groups of the first version for devices in {groups}")
    try:
        with cluster_of(version, [], os.cpu_count() or 1) as cluster:
            _constrain(cluster)
            run = submit(tmp_path / "run", cluster.env, SHAPE, step_s=0.1)
            run.wait_for_step(2)
            for rank in run.ranks().values():
                assert (
                    f"/slurm_{rank.environ['SLURMD_NODENAME']}/"
                    in Path(f"/proc/{rank.pid}/cgroup").read_text()
                )
                assert len(os.sched_getaffinity(rank.pid)) == 1
            check_preempted_run_continues(run, cluster)
    finally:
        # slurmd does not remove the groups of its node.
        for group in Path("/sys/fs/cgroup").glob(f"*/slurm_pytest-s-{os.getpid()}-*"):
            group.rmdir()


def _constrain(cluster: Sandbox) -> None:
    """Restart all daemons with control groups, and fail unless these deny other devices."""
    text = cluster.conf.read_text()
    for plugin in ("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none"):
        text = text.replace(plugin, f"{plugin.rpartition('/')[0]}/cgroup")
    cluster.conf.write_text(text)
    cgroup_conf = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
    cgroup_conf += "".join(f"Constrain{what}=yes\n" for what in ("Devices", "Cores", "RAMSpace"))
    cluster.conf.with_name("cgroup.conf").write_text(cgroup_conf)
    pids = {pid for label, pid in cluster.daemons().items() if label.startswith("slurm")}
    for process in processes():
        if process.pid in pids:
            process.kill()
    wait_for(lambda: list(cluster.daemons().values()).count(None) == len(pids), 5, "the end of the daemons")
    cluster.start()
    command = ["srun", "--gpus-per-node=1", "head", "--bytes=1", *cluster.devices]
    denied = run_command(command, cluster.env, check=False).stderr.count("Operation not permitted")
    assert denied == len(cluster.devices) - 1
