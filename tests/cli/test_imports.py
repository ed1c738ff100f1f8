"""Imports of the command line: it starts fast and never imports torch."""

import sys
from pathlib import Path

import pytest
from helpers.commands import run_command

# Each takes longer to import than the rest of a dry run together, or shows that something does.
HEAVY = {"torch", "numpy", "rich", "submitit", "importlib.metadata", "asyncio"}
#: Modules that a dry run does not need.
UNNEEDED_IN_DRY_RUN = {"socket", "hpctrain.record_types", "hpctrain.jobs.runs.run_status"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["submit", "--dry-run", "--backend", "local", "train.py"],
        ["status", "r"],
        ["list"],
        ["env"],
        ["exec", "true"],
        ["checkpoints", "r", "--verify"],
    ],
)
def test_no_command_imports_torch(hpctrain, tmp_path, args):
    if "r" in args:
        submit = ("submit", "--backend", "local", "--run-dir", "r", "--follow", "train.py")
        assert hpctrain(*submit).returncode == 0
    imported = imports(tmp_path, *args)
    assert not HEAVY & imported
    if args[0] == "submit":
        assert not UNNEEDED_IN_DRY_RUN & imported


@pytest.mark.slow
def test_completion_imports_no_torch(tmp_path):
    env = {"_HPCTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "hpctrain submit --ti", "COMP_CWORD": "2"}
    assert not HEAVY & imports(tmp_path, env=env)


def imports(folder: Path, *args: str, env: dict[str, str] | None = None) -> set[str]:
    """Return the modules that a command imports."""
    probe = ["-X", "importtime", "-m", "hpctrain"]
    result = run_command([sys.executable, *probe, *args], env, cwd=folder)
    return {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
