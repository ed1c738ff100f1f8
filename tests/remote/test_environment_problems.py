"""Each problem of a cluster is one clear sentence."""

import shutil
from pathlib import Path

import pytest
from helpers.ssh_cluster import Laptop, SshCluster, started

pytestmark = pytest.mark.slow
SUBMIT = ("submit", "--on", "alpha", "train.py")
LOCAL = (*SUBMIT[:-1], "--backend", "local", "train.py")


def problems(laptop: Laptop, *args: str) -> list[str]:
    result = laptop.hpctrain(*args, check=False)
    assert result.returncode == 2, result
    return result.stderr.removeprefix("Error: ").splitlines()


def hide_programs(cluster: SshCluster, *hidden: str, python: str = "") -> Path:
    """Let the login shell find only a few programs, and a python3 with this script; return their folder."""
    tools = cluster.folder / "bin"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir()
    for name in {"cat", "mkdir", "head", "tail", "rm", "df", "tr", "cut", "rsync", "sbatch"} - {*hidden}:
        (tools / name).symlink_to(shutil.which(name) or "/bin/true")
    if python:
        (tools / "python3").write_text(f"#!/bin/sh\n{python}\n")
        (tools / "python3").chmod(0o755)
    cluster.write_profile(PATH=str(tools))
    return tools


def test_full_disk(laptop: Laptop):
    with started(SshCluster(laptop, "alpha"), tmpfs="512K"):
        (problem,) = problems(laptop, *LOCAL)
    assert problem == (
        "Cannot write to hpctrain/project on alpha: No space left on device. Free space there, or choose "
        "another folder with `hpctrain --on alpha setup --folder DIR`."
    )


def test_variable_that_is_not_set(laptop: Laptop, cluster: SshCluster):
    for option in ("--folder", "--python"):
        (problem,) = problems(laptop, "--on", "alpha", "setup", option, "$NOPE/x")
        assert problem == (
            "A path (--folder or --python) contains the variable NOPE, which is not set on alpha. "
            "Use another path."
        )


def test_missing_and_old_python(laptop: Laptop, cluster: SshCluster):
    remedy = (
        "Load a suitable Python in ~/.bash_profile there, or select one with "
        "`hpctrain --on alpha setup --python PATH`."
    )
    hide_programs(cluster)
    (problem,) = problems(laptop, *SUBMIT)
    assert problem == f"alpha needs Python 3.11 or newer, but none is on the PATH. {remedy}"
    asked = ("--on", "alpha", "setup", "--python", "~/gone", "--folder", "~/other")
    (problem,) = problems(laptop, *asked)
    assert problem == f"alpha needs Python 3.11 or newer, but ~/gone does not run. {remedy}"
    (problem,) = problems(laptop, *SUBMIT)  # which does not use ~/gone
    assert problem == f"alpha needs Python 3.11 or newer, but none is on the PATH. {remedy}"
    tools = hide_programs(cluster, "rsync", python="[ $1 = --version ] && echo Python 3.6.8")
    old, no_rsync = problems(laptop, *SUBMIT)
    assert old == f"alpha needs Python 3.11 or newer, but {tools}/python3 is Python 3.6.8. {remedy}"
    assert no_rsync == "alpha has no rsync, which sends the code. Install rsync there."


def test_missing_hpctrain_and_slurm(laptop: Laptop, cluster: SshCluster):
    tools = hide_programs(cluster, "sbatch", python='[ "$1" = --version ] && echo Python 3.12.1')
    missing, no_slurm = problems(laptop, *SUBMIT)
    assert (
        missing == f"{tools}/python3 on alpha has no hpctrain. Install it with `hpctrain --on alpha setup`."
    )
    assert no_slurm.startswith("alpha has no sbatch on the PATH of a login shell.")
    hide_programs(cluster, "sbatch", python='[ "$1" = --version ] && echo Python 3.12.1 || echo 0.0.1')
    (other,) = problems(laptop, *LOCAL)
    assert other == (
        "alpha has hpctrain 0.0.1, but this machine has 0.1.0. Install the same version there with "
        "`hpctrain --on alpha setup`."
    )


def test_a_file_that_is_a_folder_on_the_cluster(laptop: Laptop, cluster: SshCluster):
    kept = cluster.home / "hpctrain" / "project" / "train.py" / "data"
    kept.mkdir(parents=True)
    found = problems(laptop, *LOCAL)
    assert found == ["'train.py' is a file here, but a folder on alpha. Rename or delete that folder."]
    assert kept.is_dir()


def test_commands_before_the_first_submission(laptop: Laptop, cluster: SshCluster):
    result = laptop.hpctrain("--on", "alpha", "status", "a", check=False)
    assert result.returncode == 3
    assert result.stderr == (
        "Error: There is no folder hpctrain/project on alpha. Submit from this project first, or select "
        "another folder with `hpctrain --on alpha setup --folder DIR`.\n"
    )
    (cluster.home / "hpctrain" / "project").mkdir(parents=True)
    hide_programs(cluster, python="echo Traceback >&2; echo ImportError: a lib >&2; exit 1")
    result = laptop.hpctrain("--on", "alpha", "status", "a", check=False)
    assert result.returncode == 3
    assert result.stderr == (
        "Error: hpctrain does not start on alpha: ImportError: a lib. Run `hpctrain --on alpha setup` to "
        "find the cause or to install hpctrain.\n"
    )
