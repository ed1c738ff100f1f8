"""Damaged or malicious run folders: commands end, with hpctrain's own errors only."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from helpers.run_histories import EVENTS, FAILURE, METRICS, SPEC, to_jsonl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpctrain.cli.main import cli
from hpctrain.cli.resume import resubmit_command
from hpctrain.rundir import RunDir

COMMANDS = [
    ["status", "r"],
    ["status", "r", "--json"],
    ["logs", "r"],
    ["logs", "r", "--errors"],
    ["report", "r", "--json"],
    ["report", "r"],
    ["top", "r", "--once"],
    ["wait", "r", "--timeout", "0"],
    ["checkpoints", "r", "--verify"],
    ["list"],
]
#: Objects in place of a regular file.
ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


def write_run(runs: Path, name: str = "r") -> RunDir:
    """A failed run with one file of each kind."""
    run = RunDir(runs / name)
    for folder in (run.attempt_logs(0), run.failures, run.telemetry(0).parent):
        folder.mkdir(parents=True)
    contents = {
        run.spec: json.dumps(SPEC),
        run.events: to_jsonl(EVENTS),
        run.metrics: to_jsonl(METRICS),
        run.environment: to_jsonl([{"args": "--a b", "attempt": 0, "time": 1_764_000_001.0}]),
        run.telemetry(0): to_jsonl([{"time": 1_764_000_002.0, "host": "n1", "gpu_util": [5.0]}]),
        run.failure(0, 0): json.dumps(FAILURE),
        run.rank_log(0, 0): "step\n",
        run.log_index(0, 0): to_jsonl([{"time": 1_764_000_002.0, "rank": 0, "bytes": 5}]),
        run.slurm_log: "srun: x\n",
    }
    for path, content in contents.items():
        path.write_text(content)
    return run


def invoke(runs: Path, *argv: str) -> Result:
    """Run a command in this process, without Slurm. Only hpctrain's own exceptions are accepted."""
    result = CliRunner(env={"PATH": "/nonexistent"}).invoke(cli, [*argv, "--runs-dir", str(runs)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{argv}: {result.exception!r}") from result.exception
    assert result.exit_code in (0, 1, 2, 3, 4), (argv, result.output)
    return result


def list_files(run: RunDir) -> list[Path]:
    return sorted(path for path in run.path.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("number", range(9))
def test_commands_survive_special_files(tmp_path, number, kind):
    run = write_run(tmp_path)
    path = list_files(run)[number]
    path.unlink()
    ODD[kind](path)
    for argv in COMMANDS:
        invoke(tmp_path, *argv)


@pytest.mark.parametrize(
    "damage",
    [
        {"time": 1, "attempt": 0, "kind": "submitted"},
        {"time": 10**400, "attempt": 0, "kind": "started", "nodes": "many"},
        {"kind": ["seen"]},
    ],
)
def test_damaged_event_is_skipped_with_a_warning(tmp_path, damage, caplog):
    run = write_run(tmp_path)
    run.events.write_text(to_jsonl([*EVENTS, damage]))
    result = invoke(tmp_path, "status", "r", "--json")
    assert json.loads(result.stdout)["state"] == "FAILED"
    assert f"Skipped a damaged line in {run.events}" in caplog.text
    for argv in COMMANDS:
        assert invoke(tmp_path, *argv).exit_code in (0, 4), argv


@pytest.mark.parametrize("kind", ODD)
def test_damaged_run_does_not_hide_others(tmp_path, kind):
    write_run(tmp_path, "good")
    run = write_run(tmp_path, "bad")
    run.events.unlink()
    ODD[kind](run.events)
    result = invoke(tmp_path, "list")
    assert result.exit_code == 0
    good, bad = sorted(result.stdout.splitlines()[1:], reverse=True)
    assert good.startswith("good  FAILED")
    assert bad.startswith("bad   UNKNOWN")
    assert f"cannot read {run.events}: " in bad
    cancelled = invoke(tmp_path, "cancel", "bad")
    assert cancelled.exit_code == 1
    assert str(run.events) in cancelled.stderr


def test_unreadable_metrics_do_not_hide_the_state(tmp_path, caplog):
    run = write_run(tmp_path)
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    status = json.loads(invoke(tmp_path, "status", "r", "--json").stdout)
    assert (status["state"], status["step"], status["loss"]) == ("FAILED", None, None)
    assert f"Cannot read {run.metrics}: Not a regular file." in caplog.text


@pytest.mark.parametrize("limit", ["null x", "60", [60], {"60": 1}, True, math.nan, -math.inf, 10**400])
def test_resubmit_command_omits_an_invalid_time_limit(tmp_path, limit):
    spec = {**SPEC, "time_limit_s": limit}
    write_run(tmp_path).spec.write_text(yaml.safe_dump(spec))
    _, command = resubmit_command(spec)
    assert "--time" not in command
    reported = invoke(tmp_path, "report", "r", "--json")
    assert reported.exit_code == 0
    assert command in json.loads(reported.stdout)["again"]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 253_402_300_800])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["submitted", "started", "failure", "local", "slurm", "\x1b]0;x\x07", "\0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def damaged_content(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content of a file with a changed or missing field, cut, or replaced by random bytes."""
    damage = draw(st.sampled_from(["field", "field", "field", "cut", "bytes", "as it is"]))
    if damage == "cut":
        return content[: draw(st.integers(0, len(content)))] + draw(st.sampled_from([b"", b"\n", b"\n{}\n"]))
    if damage == "bytes":
        return draw(st.binary(max_size=60))
    try:
        records = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        return content
    for _ in range(draw(st.integers(1, 3)) if damage == "field" else 0):
        record = draw(st.sampled_from(records))
        name = draw(st.sampled_from(sorted(record)))
        if draw(st.booleans()):
            record[name] = draw(values)
        elif len(record) > 1:
            del record[name]
    return to_jsonl(records).encode()


# Failing examples are not shrunk: each takes seconds, and the exception shows the cause.
@pytest.mark.extended
@pytest.mark.slow
@settings(
    max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_commands_survive_random_run_folders(tmp_path_factory, data):
    runs = tmp_path_factory.mktemp("runs")
    for path in list_files(write_run(runs)):
        path.write_bytes(data.draw(damaged_content(path.read_bytes()), label=path.name))
    for argv in COMMANDS:
        invoke(runs, *argv)
