"""A run is preempted and resumed on clusters with settings of larger sites, with each Slurm version."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.slurm_versions import SLURM_VERSIONS, need_slurm_version
from helpers.training_runs import JOB, Run, check_preempted_run_continues, submit
from helpers.waiting import wait_for

from hpctrain import sandbox
from hpctrain.cluster.processes import processes

INSTALLED = ""
ALL_VERSIONS = (INSTALLED, *SLURM_VERSIONS)
SHAPE = ["--nodes", "2", "--gpus-per-node", "1"]
OTHER_USER = "nobody"

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


@contextmanager
def cluster_of(version: str, settings: list[str], **options: Any) -> Iterator[sandbox.Sandbox]:
    if version:
        need_slurm_version(version)
    name = f"pytest-s{os.getpid()}"
    try:
        yield sandbox.up(
            name, nodes=2, gpus_per_node=2, settings=["KillWait=5", *settings], slurm=version, **options
        )
    finally:
        sandbox.down(name)


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


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_devices_constrained_by_control_groups(version, tmp_path):
    """A job can open only its own GPUs."""
    groups = Path("/sys/fs/cgroup/devices")
    if not (groups / "tasks").exists() or not os.access(groups, os.W_OK):
        pytest.skip(f"needs control groups of the first version for devices in {groups}")
    try:
        with cluster_of(version, []) as cluster:
            _constrain_devices(cluster)
            run = submit(tmp_path / "run", cluster.env, SHAPE, step_s=0.1)
            run.wait_for_step(2)
            for rank in run.ranks().values():
                assert (
                    f"/slurm_{rank.environ['SLURMD_NODENAME']}/"
                    in Path(f"/proc/{rank.pid}/cgroup").read_text()
                )
            check_preempted_run_continues(run, cluster)
    finally:
        # slurmd does not remove the groups of its node.
        for group in Path("/sys/fs/cgroup").glob(f"*/slurm_pytest-s{os.getpid()}-*"):
            group.rmdir()


def _constrain_devices(cluster: sandbox.Sandbox) -> None:
    """Restart all daemons with control groups, and fail unless these deny other devices."""
    text = cluster.conf.read_text()
    for plugin in ("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none"):
        text = text.replace(plugin, f"{plugin.rpartition('/')[0]}/cgroup")
    cluster.conf.write_text(text)
    cgroup_conf = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainDevices=yes\n"
    cluster.conf.with_name("cgroup.conf").write_text(cgroup_conf)
    pids = {pid for label, pid in cluster.daemons().items() if label.startswith("slurm")}
    for process in processes():
        if process.pid in pids:
            process.kill()
    wait_for(lambda: list(cluster.daemons().values()).count(None) == len(pids), 5, "the end of the daemons")
    cluster.start()
    command = ["srun", "--gpus-per-node=1", "head", "--bytes=1", *cluster.plan.devices]
    denied = run_command(command, cluster.env, check=False).stderr.count("Operation not permitted")
    assert denied == len(cluster.plan.devices) - 1


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_run_waits_for_the_limit_of_its_qos(version, tmp_path):
    enforce = "AccountingStorageEnforce=associations,limits,qos"
    with cluster_of(version, [enforce], accounting=True) as cluster:
        for words in (
            "add qos single MaxJobsPerUser=1",
            "add account physics",
            "add user root Account=physics QOS=normal,single DefaultAccount=physics",
        ):
            run_command(["sacctmgr", "--immediate", *words.split()], cluster.env)
        options = ["--partition", "preemptible", "--qos", "single"]
        first, second = (
            submit(tmp_path / name, cluster.env, SHAPE, options=options, step_s=0.1)
            for name in ("one", "two")
        )
        first.wait_for_step(2)
        status = second.status()
        assert (status["state"], status["reason"]) == ("PENDING", "QOSMaxJobsPerUserLimit")
        check_preempted_run_continues(first, cluster)
        assert second.wait() == 0


class RunOfOtherUser(Run):
    """A run of a user without root's rights."""

    def hpctrain(self, *args: str, timeout: float = 60.0, check: bool = True, **options: Any) -> Any:
        command = [*_AS_OTHER_USER, self.env["PYTHON"], "-m", "hpctrain", *args]
        return run_command(command, self.env, timeout=timeout, check=check, cwd=self.path.parent, **options)


_AS_OTHER_USER = ["setpriv", f"--reuid={OTHER_USER}", "--regid=nogroup", "--clear-groups"]


@pytest.fixture
def folder_of_other_user() -> Iterator[Path]:
    # Other users cannot enter the folders of pytest.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    shutil.chown(folder, OTHER_USER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_user_without_rights_and_with_limited_requests(version, folder_of_other_user):
    # Root's own Python may be inaccessible.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    modules = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests/scripts"), *packages]
    env = {"HOME": str(folder_of_other_user), "PYTHONPATH": os.pathsep.join(modules)}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        if not run_command([*_AS_OTHER_USER, python, "-c", "import torch"], env, check=False).returncode:
            break
    else:
        pytest.skip(f"the user {OTHER_USER} can run no Python with torch")
    # Each request above two per second is rejected for a while. Root has no such limit.
    limit = ["SlurmctldParameters=rl_enable,rl_bucket_size=5,rl_refill_rate=2"] if version else []
    with cluster_of(version, limit) as cluster:
        run = RunOfOtherUser(folder_of_other_user / "run", {**env, **cluster.env, "PYTHON": python})
        arguments = ["--step-s", "0.1", "--checkpoint-every", "6", "--slow-attempts", "1"]
        run.hpctrain("submit", *SHAPE, "--run-dir", str(run.path), str(JOB), *arguments)
        check_preempted_run_continues(run, cluster)
        assert run.path.owner() == OTHER_USER
        if version:
            assert "RPC rate limit exceeded" in (cluster.plan.logs / "slurmctld.log").read_text()
