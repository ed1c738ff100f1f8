from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.download_slurm import download_slurm, link_commands
from helpers.slurm_versions import SLURM_VERSIONS, need_slurm_version

from hpctrain import sandbox
from hpctrain.sandbox.layout import SandboxLayout, SandboxSize

VERSION = SLURM_VERSIONS[-1]


@pytest.fixture
def plan(tmp_path: Path) -> SandboxLayout:
    """A folder with the commands of another Slurm version, without daemons."""
    need_slurm_version(VERSION)
    plan = SandboxLayout(tmp_path / "box", SandboxSize(), port=26800, block=7)
    plan.folder.mkdir()
    plan.conf.write_text("ClusterName=box\nSlurmctldHost=nowhere\n")
    link_commands(plan, VERSION, download_slurm(VERSION))
    return plan


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
