"""Imports of the command line: it starts fast and never imports torch."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import run_command

# Each takes longer to import than the rest of a dry run together, or shows that something does.
HEAVY = {"torch", "numpy", "rich", "submitit", "importlib.metadata", "asyncio"}
#: Modules that a dry run does not need.
UNNEEDED_IN_DRY_RUN = {
    "socket",
    "hpctrain.jobs.runs.run_status",
    "hpctrain.jobs.runs.status_poller",
}

PROBE = """
import runpy, sys
sys.argv = ["hpctrain", *sys.argv[1:]]
try:
    runpy.run_module("hpctrain", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["submit", "--dry-run", "--backend", "local", "train.py"],
        ["status", "r"],
        ["list"],
        ["env"],
    ],
)
def test_no_command_imports_torch(hpctrain, tmp_path, args):
    if args[0] == "status":
        assert (
            hpctrain("submit", "--backend", "local", "--run-dir", "r", "--follow", "train.py").returncode == 0
        )
    result = run_command([sys.executable, "-c", PROBE, *args], cwd=tmp_path)
    imported = set(result.stderr.split())
    assert not HEAVY & imported
    if args[0] == "submit":
        assert not UNNEEDED_IN_DRY_RUN & imported
