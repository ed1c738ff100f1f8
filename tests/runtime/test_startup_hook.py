"""The hook in the Python processes of a command, in environments that differ from that of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hpctrain.cluster import detect
from hpctrain.rundir import RunDir
from hpctrain.runtime.program.process_observer import ChildRelay, ProcessObserver


@pytest.fixture
def variables(tmp_path, monkeypatch) -> dict[str, str]:
    """Variables of a command whose PYTHONPATH has modules of the user."""
    (tmp_path / "sitecustomize.py").write_text("print('customized')\n")
    (tmp_path / "torch.py").write_text("print('imported', __name__)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ranks = detect({})
    worker = ProcessObserver(RunDir(tmp_path), 0, ranks, ranks.torch_variables(), records_steps=False)
    return ChildRelay(worker).variables


PRINT_PATHS = "import os, sys, torch; print(os.environ['PYTHONPATH'].split(os.pathsep), sys.path)"


def run(
    python: str | Path, variables: dict[str, str], script: str = PRINT_PATHS
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run([python, "-c", script], env=environ, capture_output=True, text=True, timeout=120)


def test_environment_without_hpctrain_runs_the_users_sitecustomize(tmp_path, variables):
    venv.create(tmp_path / "venv", with_pip=False)
    result = run(tmp_path / "venv/bin/python", variables)
    assert (result.returncode, result.stderr) == (0, "")
    customized, imported, paths = result.stdout.splitlines()
    assert (customized, imported) == ("customized", "imported torch")
    hook = variables["PYTHONPATH"].split(os.pathsep)[0]
    assert paths.count(hook) == 1, "children inherit the hook, but it is not searched for modules"


def test_hpctrain_for_a_newer_python_does_not_break_the_program(tmp_path, variables):
    (tmp_path / "hpctrain").mkdir()
    (tmp_path / "hpctrain/__init__.py").write_text("syntax of a newer version")
    venv.create(tmp_path / "venv", with_pip=False)
    # Without the working directory.
    result = run(tmp_path / "venv/bin/python", variables, "import sys; del sys.path[0]; import torch")
    assert result.returncode == 0
    assert result.stderr.startswith("hpctrain: cannot monitor this process: SyntaxError(")


def test_process_of_another_job_is_not_observed(tmp_path, variables):
    told = {"socket": "ended", "ranks": json.loads(variables["HPCTRAIN_COMMAND"])["ranks"]}
    script = "import signal, threading, torch; print(signal.getsignal(15), threading.active_count())"
    environ = {
        **variables,
        "HPCTRAIN_COMMAND": json.dumps(told),
        "HPCTRAIN_RUN_DIR": str(tmp_path),
        "HPCTRAIN_ATTEMPT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    result = run(sys.executable, environ, script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith(f"{signal.SIG_DFL} 1\n")
