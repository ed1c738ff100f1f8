import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.commands import run_command

from hpctrain import sandbox
from hpctrain.cli.sandbox import command
from hpctrain.errors import HpctrainError, UserError


def _run(*args: str) -> Result:
    result = CliRunner().invoke(command, args)
    if isinstance(result.exception, HpctrainError):
        raise result.exception
    return result


def _json(*args: str) -> dict[str, Any]:
    result = _run(*args, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


@pytest.fixture
def name() -> Iterator[str]:
    name = f"cli-{os.getpid()}"
    try:
        yield name
    finally:
        sandbox.down(name)


@pytest.mark.slurm
def test_sandbox_goes_up_is_shown_repaired_and_taken_down(name: str) -> None:
    up = _run("up", "--name", name, "--nodes", "2", "--gpus-per-node", "1")
    assert up.exit_code == 0
    assert "is up after" in up.stdout
    assert f"hpctrain sandbox down --name {name}" in up.stdout
    repeated = _json("up", "--name", name, "--nodes", "2", "--gpus-per-node", "1")
    assert repeated["was_up"] is True

    status = _json("status", "--name", name)
    assert status["up"] is True
    assert status["nodes"] == {f"{name}-1": "idle", f"{name}-2": "idle"} == repeated["nodes"]
    assert status["partitions"] == ["preemptible", "urgent"]
    assert set(status["daemons"]) == {"munged", "slurmctld", f"slurmd {name}-1", f"slurmd {name}-2"}
    table = _run("status", "--name", name).stdout
    assert all(word in table for word in ("munged", f"slurmd {name}-2", "idle", "preemptible"))

    exports = _run("env", "--name", name).stdout
    hosts = run_command(["sh", "-c", f"eval '{exports}'; srun -N2 printenv SLURMD_NODENAME"]).stdout
    assert sorted(hosts.split()) == [f"{name}-1", f"{name}-2"]

    box = sandbox.find(name)
    assert box is not None
    box.kill_node(box.nodes[1])
    status = _json("status", "--name", name)
    assert status["up"] is False
    assert status["daemons"][f"slurmd {name}-2"] is None
    assert "not running" in _run("status", "--name", name).stdout

    repeated = _run("up", "--name", name, "--nodes", "2", "--gpus-per-node", "1").stdout
    assert f"(restarted: slurmd {name}-2): 2 nodes" in repeated
    assert "already up" not in repeated

    assert _json("down", "--name", name) == {"name": name, "was_there": True}


@pytest.mark.parametrize("command", ["status", "env", pytest.param("down", marks=pytest.mark.slurm)])
def test_missing_sandbox_is_an_error_with_a_remedy(command: str) -> None:
    with pytest.raises(UserError, match=r"There is no sandbox .absent.*sandbox up"):
        _run(command, "--name", "absent")


def test_incomplete_sandbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "list_names", lambda: ["half"])
    with pytest.raises(UserError, match=r"'half' is incomplete.*sandbox down --name half"):
        _run("status", "--name", "half")


@pytest.mark.slurm
def test_missing_sandbox_is_reported_in_json() -> None:
    for verb, document in (("status", {"name": "absent", "up": False}), ("down", {"was_there": False})):
        argv = [sys.executable, "-m", "hpctrain", "sandbox", verb, "--name", "absent", "--json"]
        result = run_command(argv, check=False)
        assert result.returncode == 2
        assert document.items() <= json.loads(result.stdout).items()
