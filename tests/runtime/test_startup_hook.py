"""The hook in the Python processes of a command, in environments that differ from that of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hpctrain.cluster import detect
from hpctrain.runtime.program.child_relay import ChildRelay


@pytest.fixture
def variables(tmp_path, monkeypatch) -> dict[str, str]:
    """Variables of a command whose PYTHONPATH has modules of the user."""
    (tmp_path / "sitecustomize.py").write_text("print('customized')\n")
    (tmp_path / "torch.py").write_text("print('imported', __name__)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return ChildRelay(detect({}), dict, lambda *_: None).variables


def run(python: str | Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = "import os, sys, torch; print(os.environ['PYTHONPATH'].split(os.pathsep), sys.path)"
    environ = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run([python, "-c", script], env=environ, capture_output=True, text=True, timeout=30)


def test_environment_without_hpctrain_runs_the_users_sitecustomize(tmp_path, variables):
    venv.create(tmp_path / "venv", with_pip=False)
    result = run(tmp_path / "venv/bin/python", variables)
    assert (result.returncode, result.stderr) == (0, "")
    customized, imported, paths = result.stdout.splitlines()
    assert (customized, imported) == ("customized", "imported torch")
    hook = variables["PYTHONPATH"].split(os.pathsep)[0]
    assert paths.count(hook) == 1, "children inherit the hook, but it is not searched for modules"


def test_environment_without_a_sitecustomize(tmp_path, variables):
    (tmp_path / "sitecustomize.py").unlink()
    result = run(sys.executable, {**variables, "HPCTRAIN_COMMAND": "damaged"})
    assert result.returncode == 0
    assert result.stdout.startswith("imported torch\n")
    assert result.stderr.startswith("hpctrain: this process cannot be observed: JSONDecodeError(")
