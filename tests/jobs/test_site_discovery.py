"""Discovery of a site: parsing Slurm's output, and reading and writing a profile."""

from pathlib import Path

import pytest
import yaml
from helpers.commands import environment

from hpctrain.errors import SpecError
from hpctrain.jobs.backends.mounts import find_mount
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor.probe import DoctorReport
from hpctrain.jobs.doctor.site_profile import profile_options
from hpctrain.jobs.options.resolved_options import resolve_options
from hpctrain.slurm import parsing
from hpctrain.slurm.config import SlurmConfig, parse_config
from hpctrain.slurm.site_facts import Site, SiteConventions


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:2", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,1),gpu:h100:2,nvme:1", {"a100": 4, "h100": 2}),
        ("craynetwork:4,gpu:a100_3g.40gb:2", {"a100_3g.40gb": 2}),
        ("gpu:a:1,gpu:a:2", {"a": 3}),
        ("mygpu:4,shard:8", {}),
    ],
)
def test_gpus_are_parsed_from_gres(gres, gpus):
    assert parsing.parse_gpus(gres) == gpus


def test_slurm_config_is_parsed():
    config = parse_config(
        """Configuration data as of 2026-11-21T07:49:55
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = big
DefMemPerCPU            = 2000
EnforcePartLimits       = ALL
JobRequeue              = 0
JobSubmitPlugins        = lua
KillWait                = 30 sec
MaxArraySize            = 4001
MaxMemPerNode           = UNLIMITED
PowerPlugin             =
PreemptMode             = GANG,SUSPEND
PreemptType             = preempt/qos
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldParameters     = enable_expedited_requeue,enable_configless
SLURM_VERSION           = 24.11.5
"""
    )
    assert config == SlurmConfig(
        cluster="big",
        version="24.11.5",
        accounting=True,
        enforced=("associations", "limits", "qos"),
        job_requeue=False,
        preempt_type="qos",
        preempt_mode="GANG,SUSPEND",
        expedites_requeues=True,
        kill_wait_s=30,
        max_array_size=4001,
        def_mem_per_cpu_mib=2000,
        select="cons_tres",
        hands_out_memory=True,
        enforces_limits="ALL",
        chooses_partition=True,
    )


def test_real_site_is_discovered_completely(slurm):
    site, gaps = SlurmBackend(environment(slurm.env)).site_with_gaps(SiteConventions())
    assert gaps == []
    assert (site.slurm.cluster, site.slurm.job_requeue, site.slurm.accounting) == (slurm.name, True, False)
    assert site.slurm.kill_wait_s == 5
    preemptible, urgent = site.partitions
    assert (preemptible.name, preemptible.default, preemptible.max_time_s) == ("preemptible", True, None)
    assert (preemptible.preempt_mode, preemptible.grace_time_s) == ("REQUEUE", 30)
    assert (urgent.name, urgent.preempt_mode, urgent.priority_tier) == ("urgent", "OFF", 100)
    assert sum(group.num for group in preemptible.groups) == 4
    assert {(group.cpus, group.num_gpus) for group in preemptible.groups} == {(8, 2)}


def test_missing_slurm_output_is_noted(tmp_path):
    site, gaps = SlurmBackend({"PATH": str(tmp_path)}).site_with_gaps(HABITS)
    assert site == Site(habits=HABITS)
    assert gaps == [
        "Cannot query the nodes (sinfo not found on PATH)",
        "Cannot query Slurm's configuration (scontrol not found on PATH)",
        "Cannot query the partitions (scontrol not found on PATH)",
    ]


HABITS = SiteConventions(memory_option="refused", needs_time=True, containers=("pyxis",))


def _read(tmp_path: Path, text: str) -> SiteConventions:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return resolve_options({}, cwd=tmp_path, environ={"HPCTRAIN_SITE_CONFIG": str(path)}).habits


@pytest.mark.parametrize("habits", [HABITS, SiteConventions()])
def test_profile_round_trips(tmp_path, habits):
    report = DoctorReport((), Site(habits=habits))
    assert _read(tmp_path, yaml.safe_dump(profile_options(report))) == habits


def test_later_files_extend_the_site(tmp_path):
    folder = tmp_path / "site.d"
    folder.mkdir()
    (folder / "1.yaml").write_text("partition: gpu\nsite: {habits: {needs_time: yes}}\n")
    (folder / "2.yaml").write_text("site:\n  habits: {requeue: no}\n")
    settings = resolve_options({}, cwd=tmp_path, environ={"HPCTRAIN_SITE_CONFIG": str(folder)})
    assert settings.options["sbatch"] == {"partition": "gpu"}
    assert settings.habits == SiteConventions(needs_time=True, requeue=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("site:\n  habbits: {}", r"site\.yaml:2: unknown key 'habbits' in site\. Did you mean 'habits'\?"),
        ("site: {habits: {requeue: maybe}}", r"yaml:1: site\.habits\.requeue is 'maybe', .* true or false"),
        ("site:\n  habits:\n    memory_option: some", r"yaml:3: .* must be accepted, ignored or refused"),
        ("site: {habits: {needs: yes}}", r"unknown key 'needs' in site\.habits"),
        ("site: {habits: {requeue: [no]}}", r"site\.habits\.requeue is a list"),
        ("site: [1]", r"site must be a mapping"),
        ("sites: {}", r"unknown option 'sites'\. Did you mean 'site'\?"),
        ("profiles: {a: {site: {}}}", r"'site' is a section of configuration files"),
    ],
)
def test_invalid_profile_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        _read(tmp_path, text)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw,local_lock=none 0 0
server:/a\\040b /mnt/a\\040b nfs rw 0 0
fs /scratch fuse.beegfs rw 0 0
fs /shared/tmp lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "mount_point", "shared"),
    [
        ("/home/me/run", "/home", True),
        ("/homes/me", "/", False),
        ("/mnt/a b/c", "/mnt/a b", True),
        ("/scratch", "/scratch", True),
        ("/tmp/x", "/tmp", False),
    ],
)
def test_mount_of_a_path_is_found(tmp_path, path, mount_point, shared):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    mount = find_mount(path, table)
    assert (mount.point, mount.is_shared) == (mount_point, shared)
