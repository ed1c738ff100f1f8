from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.slurm_versions import SLURM_VERSIONS, need_slurm_version

from hpctrain import sandbox
from hpctrain.errors import SpecError, UserError
from hpctrain.sandbox.download_slurm import CACHE, download_slurm, link_commands, matches_version
from hpctrain.sandbox.layout import SandboxLayout, SandboxSize

VERSION = SLURM_VERSIONS[-1]


@pytest.fixture
def plan(tmp_path: Path) -> SandboxLayout:
    """A folder with the commands of another Slurm version, without daemons."""
    need_slurm_version(VERSION)
    plan = SandboxLayout(tmp_path / "box", SandboxSize(slurm=VERSION), port=26800, block=7)
    plan.folder.mkdir()
    plan.conf.write_text("ClusterName=box\nSlurmctldHost=nowhere\n")
    link_commands(plan, download_slurm(VERSION))
    return plan


def test_a_version_matches_its_releases_only() -> None:
    assert matches_version("26.05", "26.05.5")
    assert matches_version("26.05.5", "26.05.5")
    assert not matches_version("6.05", "26.05.5")
    assert not matches_version("26.0", "26.05.5")
    assert not matches_version("", "26.05.5")
    assert not matches_version("26.05", "")


def test_commands_are_those_of_the_version_in_its_sandbox_only(plan: SandboxLayout, tmp_path: Path) -> None:
    names = {path.name for path in plan.commands.iterdir()}
    assert {"sbatch", "srun", "squeue", "scontrol", "sacct"} < names
    other = tmp_path / "slurm.conf"
    other.write_text(plan.conf.read_text().replace("ClusterName=box", "ClusterName=boxes"))
    for conf, version in ((plan.conf, VERSION), (other, sandbox.installed_version())):
        result = run_command([plan.commands / "sbatch", "--version"], {"SLURM_CONF": str(conf)})
        assert result.stdout.split()[1].startswith(version)


def test_command_keeps_arguments_environment_and_folder(plan: SandboxLayout, tmp_path: Path) -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    arguments = ["", " ", "$(x)", "'", '"', "a\nb", "\\", "é", "-c"]
    # The shell of the launcher sets PWD.
    env = {"SLURM_CONF": str(plan.conf), "PWD": str(tmp_path), "name": "a b", "options": "x", "mount": ""}
    expected, outside, inside = (
        json.loads(run_command([*launcher, sys.executable, "-c", code, *arguments], env, cwd=tmp_path).stdout)
        for launcher in ([], [plan.launcher], [plan.launcher, plan.launcher])
    )
    assert expected == outside == inside


def test_machine_sees_nothing_of_it(plan: SandboxLayout) -> None:
    run_command([plan.launcher, "test", "-e", "/usr/.hpctrain-slurm"])
    assert not Path("/usr/.hpctrain-slurm").exists()
    assert str(CACHE) not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("version", ["banana", "26", "../26.05", "26.05\n", "26.05.5.1"])
def test_invalid_version_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is not a valid Slurm version\. Use the form 26\.05"):
        download_slurm(version, tmp_path)


@pytest.mark.slow
def test_mirror_that_does_not_respond_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens on this port.
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"apt-get failed with exit code 100: E: .*127\.0\.0\.1"):
        download_slurm(VERSION, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
def test_version_that_the_mirror_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    need_slurm_version(VERSION)
    with pytest.raises(
        SpecError, match=rf"does not offer Slurm 19\.05\. Available versions: .*{VERSION}\.\d+ \("
    ):
        download_slurm("19.05", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_full_disk_is_reported(tmp_path: Path) -> None:
    code = "from pathlib import Path; from hpctrain.sandbox import download_slurm as module; "
    code += f"module.download_slurm({VERSION!r}, Path({str(tmp_path)!r}))"
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, tmp_path, sys.executable, "-c", code]
    result = run_command(command, check=False)
    assert f"UserError: Slurm {VERSION} needs 600 MB in" in result.stderr
    assert "but only 1 MB are free" in result.stderr


def test_machine_that_forbids_mounts_is_reported(tmp_path: Path) -> None:
    need_slurm_version(VERSION)
    code = "from pathlib import Path; from hpctrain.sandbox import download_slurm as module, layout; "
    code += f"size = layout.SandboxSize(slurm={VERSION!r}); "
    code += f"plan = layout.SandboxLayout(Path({str(tmp_path)!r}), size, port=26800, block=7); "
    code += f"module.link_commands(plan, module.download_slurm({VERSION!r}))"
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", code]
    result = run_command(command, check=False)
    assert f"UserError: Slurm {VERSION} requires an overlay mount in a private namespace" in result.stderr
    assert "Operation not permitted" in result.stderr
