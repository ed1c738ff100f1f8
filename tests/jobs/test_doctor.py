"""The checks of `hpctrain doctor`: a site with a job submit plugin, folders, containers and torch."""

import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers.commands import environment, run_command
from helpers.waiting import slowness

from hpctrain import sandbox
from hpctrain.errors import UserError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor import machine_checks
from hpctrain.jobs.doctor.machine_checks import (
    check_containers,
    check_gpus,
    check_runs_folder,
    torch_findings,
)
from hpctrain.jobs.doctor.probe import DoctorReport, Finding, ProbeFailed, run_python_probe
from hpctrain.jobs.doctor.run_checks import (
    check_accounting,
    config_findings,
    partition_findings,
)
from hpctrain.jobs.doctor.site_profile import probe_options, write_profile_file
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.site_facts import NodeGroup, Partition, Site, SiteConventions


def standings(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.standing for finding in findings}


_BOTH = {"memory": "note", "time limit": "note"}
_LUA = """
function slurm_job_submit(job, partitions, user)
   local memory = job.pn_min_memory ~= nil and job.pn_min_memory ~= slurm.NO_VAL64
   local time = job.time_limit ~= slurm.NO_VAL
   local account = job.account ~= nil
   if {condition} then
      slurm.log_user("{words}")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
   return slurm.SUCCESS
end
"""


@pytest.fixture(scope="module")
def plugin_cluster() -> Iterator[sandbox.Sandbox]:
    """A cluster with a job submit plugin that tests configure."""
    name = f"lua-{os.getpid()}"
    try:
        box = sandbox.up(name, nodes=1, gpus_per_node=1)
        (box.folder / "job_submit.lua").write_text(_LUA.format(condition="false", words=""))
        with box.conf.open("a") as conf:
            conf.write("JobSubmitPlugins=lua\n")
        run_command(["scontrol", "reconfigure"], box.env)
        yield box
    finally:
        sandbox.down(name)


@pytest.fixture
def probe_refusing_site(plugin_cluster):
    """Return the probe results at a site whose plugin refuses jobs of one kind."""

    def call(condition: str):
        script = plugin_cluster.folder / "job_submit.lua"
        before = script.stat().st_mtime
        script.write_text(_LUA.format(condition=condition, words="not here"))
        # Slurm reads it again when its modification time, in whole seconds, is later.
        os.utime(script, (max(time.time(), before) + 2,) * 2)
        environ = environment(plugin_cluster.env)
        site, _ = SlurmBackend(environ).site_with_gaps(SiteConventions())
        return probe_options(site, environ)

    return call


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("condition", "habits", "notes"),
    [
        ("false", SiteConventions(memory_option="ignored"), {}),
        ("memory", SiteConventions(memory_option="refused"), {"memory": "note"}),
        ("memory or not time", SiteConventions(memory_option="refused", needs_time=True), _BOTH),
        (
            "not memory or not time",
            SiteConventions(memory_option="ignored", needs_time=True, needs_memory=True),
            _BOTH,
        ),
    ],
)
def test_demands_of_a_site_plugin_are_found(probe_refusing_site, condition, habits, notes):
    probed = probe_refusing_site(condition)
    assert probed.site.habits == habits
    all_ok = {"a plain job": "ok", "memory": "ok", "time limit": "ok", "GPUs": "ok"}
    assert standings(probed.findings) == all_ok | notes
    for finding in probed.findings:
        if finding.standing == "note":
            assert finding.value.endswith(": not here")


@pytest.mark.slurm
def test_site_that_refuses_every_plain_job_is_a_problem(probe_refusing_site):
    (finding,) = probe_refusing_site("not account").findings
    assert (finding.name, finding.value, finding.standing) == ("a plain job", "refused: not here", "problem")


def test_gpu_request_style_is_found_with_fake_sbatch(tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        '#!/bin/sh\ncase "$*" in *--gres*) echo "sbatch: error: use the other" >&2; exit 1;; esac\n'
    )
    sbatch.chmod(0o755)
    groups = (NodeGroup(num=1, cpus=1, memory_mib=1, gpus={"": 2}),)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    probed = probe_options(Site(partitions=(Partition(name="p", groups=groups),)), environ)
    assert probed.gpu_request_style == "gpus-per-node"
    assert (
        probed.findings[-1].value
        == "can be requested with --gpus-per-node; --gres is rejected: use the other"
    )
    assert probed.findings[-1].mend.startswith("Set `gpu_request_style: gpus-per-node` in")
    assert probe_options(Site(), environ).findings[-1].value == "none in any partition"


def test_settings_that_delay_runs_are_noted():
    assert set(standings(config_findings(SlurmConfig())).values()) == {"ok"}
    odd = SlurmConfig(job_requeue=False, kill_wait_s=5)
    notes = [name for name, standing in standings(config_findings(odd)).items() if standing == "note"]
    assert notes == ["requeue", "KillWait"]


def test_unresponsive_accounting_is_noted_with_fake_sacct(tmp_path):
    _script(tmp_path / "sacct", "echo 'sacct: error: slurm_persist_conn_open failed' >&2; exit 1")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    silent = check_accounting(SlurmConfig(accounting=True), environ)
    assert (silent.standing, silent.value) == (
        "note",
        "slurmdbd does not respond: sacct failed: slurm_persist_conn_open failed",
    )
    assert check_accounting(SlurmConfig(), environ).value == "disabled, so sacct is not available"


def test_each_partition_has_one_finding():
    groups = (
        NodeGroup(num=3, cpus=8, memory_mib=100, gpus={"a100": 4}),
        NodeGroup(num=1, cpus=8, memory_mib=100, gpus={"a100": 4}, state="down*"),
        NodeGroup(num=2, cpus=1, memory_mib=100),
    )
    low = Partition(
        name="low",
        default=True,
        max_time_s=7200.0,
        default_time_s=60.0,
        max_nodes=2,
        preempt_mode="CANCEL",
        groups=groups,
        allow_accounts=("physics",),
    )
    site = Site(
        slurm=SlurmConfig(preempt_type="partition_prio", preempt_mode="CANCEL"),
        partitions=(low, Partition(name="high", priority_tier=2), Partition(name="off", state="DOWN")),
    )
    first, second, third = partition_findings(site)
    assert first.name == "low (default)"
    assert first.value == (
        "4 nodes with 8 CPUs, 100 MiB, 4 a100 GPUs + 2 nodes with 1 CPU, 100 MiB; time limit 02:00:00, "
        "default time 00:01:00, at most 2 nodes, for accounts physics; preemption: CANCEL, grace time 0 s"
    )
    assert (second.standing, second.value) == ("ok", "no nodes; no time limit")
    assert third.mend == "The partition accepts or starts no new jobs now (State=DOWN)."
    no_default = next(partition_findings(Site(partitions=(Partition(name="p"),))))
    assert (no_default.name, no_default.standing) == ("default", "note")


def test_runs_folder_is_probed_and_left_unchanged(tmp_path):
    folder = tmp_path / "not" / "there"
    findings = list(check_runs_folder(folder, environment(), other_machines=False))
    assert standings(findings)["locking"] == "ok"
    assert {"file system", "free space"} <= standings(findings).keys()
    assert findings[0].value.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_runs_folder_is_a_problem():
    *_, writing = check_runs_folder(Path("/proc/runs"), environment(), other_machines=False)
    assert (writing.name, writing.standing) == ("writing", "problem")


_FACTS = {"folder": "/x", "mount": "lustre (server:/x on /x)", "is_shared": True, "per_node": False}
_FACTS |= {"free_bytes": 1 << 40, "locking": ""}


@pytest.mark.parametrize(
    ("changes", "name", "standing"),
    [
        ({}, None, "ok"),
        ({"locking": "Function not implemented"}, "locking", "problem"),
        ({"free_bytes": 1 << 20}, "free space", "note"),
        ({"is_shared": False}, "file system", "note"),
        ({"is_shared": False, "per_node": True}, "file system", "problem"),
    ],
)
def test_missing_file_system_features_are_reported(monkeypatch, changes, name, standing):
    monkeypatch.setattr(machine_checks, "run_python_probe", lambda *_: _FACTS | changes)
    names = standings(check_runs_folder(Path("/x"), {}, other_machines=True))
    assert names == dict.fromkeys(names, "ok") | ({name: standing} if name else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limit_s", "message"),
    [
        ("import time; time.sleep(60)", 0.5, r"no response within 0\.5 s"),
        (
            "from signal import *; signal(SIGTERM, SIG_IGN); [pause() for _ in iter(int, 1)]",
            0.5,
            "no response",
        ),
        ("raise ValueError(3)", 20, "ValueError: 3"),
        ("print('no JSON')", 20, "the output is invalid"),
    ],
)
def test_failed_probe_is_reported_in_time(code, limit_s, message):
    start = time.monotonic()
    with pytest.raises(ProbeFailed, match=message):
        run_python_probe(["-c", code], environment(), limit_s)
    assert time.monotonic() - start < 30 * slowness()


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_container_runtimes_are_found_with_fake_programs(tmp_path):
    environ = {"PATH": str(tmp_path)}
    assert check_containers(environ)[1] == ()
    _script(tmp_path / "enroot", "echo 3.5.0")
    findings, runtimes = check_containers(environ)
    assert runtimes == ("enroot",)
    assert [(finding.name, finding.standing) for finding in findings] == [("enroot", "ok"), ("pyxis", "note")]
    _script(tmp_path / "srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]'")
    _script(tmp_path / "apptainer", "")
    findings, runtimes = check_containers(environ)
    assert runtimes == ("pyxis", "apptainer", "enroot")


@pytest.mark.parametrize(
    ("addresses", "standing", "message"),
    [
        (["10.0.0.5"], "ok", "resolves to 10.0.0.5"),
        (["127.0.1.1"], "note", "resolves to 127.0.1.1"),
        (OSError("Name or service not known"), "note", "does not resolve: Name or service not known"),
    ],
)
def test_host_name_resolution_is_checked(monkeypatch, addresses, standing, message):
    def resolve(name: str) -> list[str]:
        assert name == socket.gethostname()
        if isinstance(addresses, OSError):
            raise addresses
        return addresses

    monkeypatch.setattr(machine_checks, "resolve_host", resolve)
    name, interfaces = machine_checks.check_network()
    assert (name.standing, interfaces.name) == (standing, "interfaces")
    assert message in name.value


_TORCH = {"version": "2.13", "cuda": "13.0", "rocm": None, "usable": True, "num_gpus": 4, "warning": ""}
_TORCH |= {"nccl": "2.28", "gloo": True}


@pytest.mark.parametrize(
    ("facts", "gpus_here", "gpus_of_site", "standing", "message"),
    [
        (_TORCH, 4, 0, "ok", "built for CUDA 13.0, can use 4 GPUs on this machine"),
        (_TORCH | {"usable": False}, 0, 8, "ok", "2.13, built for CUDA 13.0"),
        (_TORCH | {"usable": False, "cuda": None}, 0, 0, "ok", "built for CPUs"),
        (_TORCH | {"usable": False, "cuda": None}, 0, 8, "note", "built for CPUs"),
        (_TORCH | {"usable": False, "warning": "too old"}, 1, 0, "problem", "GPUs on this machine: too old"),
        (ProbeFailed("no module"), 0, 0, "problem", "cannot be imported: no module"),
    ],
)
def test_torch_findings_depend_on_gpus(facts, gpus_here, gpus_of_site, standing, message):
    torch, *_ = torch_findings(facts, gpus_here=gpus_here, gpus_of_site=gpus_of_site)
    assert (torch.name, torch.standing) == ("torch", standing)
    assert torch.value.endswith(message)


@pytest.mark.gpu
def test_gpus_of_this_machine_are_described():
    findings, number = check_gpus(dict(os.environ))
    assert number > 0
    assert standings(findings)["driver"] == "ok"
    assert " × " in findings[0].value


def test_profile_is_written_to_a_new_file(tmp_path):
    path = tmp_path / "etc" / "site.yaml"
    site = Site(slurm=SlurmConfig(cluster="c"), habits=SiteConventions(requeue=False))
    report = DoctorReport((), site, gpu_request_style="gpus-per-node")
    write_profile_file(report, path)
    profile = {"gpu_request_style": "gpus-per-node", "site": {"habits": {"requeue": False}}}
    assert yaml.safe_load(path.read_text()) == profile
    with pytest.raises(UserError, match="exists already"):
        write_profile_file(report, path)
