"""`hpctrain report`: output path, format and arguments."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from helpers.run_histories import make_spec, started_run, write_run
from helpers.waiting import wait_for
from msgspec import to_builtins

from hpctrain.cli import resume, submit
from hpctrain.cli.main import cli
from hpctrain.cli.resume import resubmit_command
from hpctrain.files import is_locked, read_json_lines
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobs.options.resolved_options import COMMAND_LINE_SOURCE, resolve_options
from hpctrain.jobs.options.spec_builder import build_spec
from hpctrain.rundir import RunDir

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

EVENTS = [
    {"time": 1_764_000_000.0, "attempt": 0, "kind": "started", "nodes": 1, "world_size": 1, "hosts": ["n1"]},
    {"time": 1_764_000_100.0, "attempt": 0, "kind": "finished", "state": "COMPLETED", "exit_code": 0},
]


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A training run without a submission."""
    run = RunDir(tmp_path / "runs" / "digits")
    run.path.mkdir(parents=True)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    lines = [{"step": n, "loss": 1 / n, "time": 1_764_000_000.0 + n, "attempt": 0} for n in range(1, 51)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_page_is_written_to_the_run_folder(hpctrain, run):
    result = hpctrain("report", "digits")
    assert result.stdout == "Report written to runs/digits/report.html\n"
    assert result.returncode == 0
    assert run.report.read_text().startswith("<!doctype html>")


def test_json_is_one_document_and_the_format_follows_the_file_extension(hpctrain, run, tmp_path):
    document = json.loads(hpctrain("report", "digits", "--json").stdout)
    assert (document["state"], document["step"], document["loss"]) == ("COMPLETED", 50, 1 / 50)
    assert sum(row["us"] or 0 for row in document["ledger"]) == document["wall_us"] == 100_000_000
    assert hpctrain("report", "digits", "-o", "digits.json").returncode == 0
    assert json.loads((tmp_path / "digits.json").read_text())["state"] == "COMPLETED"
    assert hpctrain("report", "digits", "-o", "-").stdout.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([], None),
        ([(4, 2), (1, 1)], "4 ranks on 2 nodes"),  # one after the other
        ([(4, None)], "4 ranks on 3 nodes"),
        ([(4, 2), (None, None)], None),  # at once
    ],
)
def test_ranks_that_a_batch_script_starts_are_shown_if_known(hpctrain, run, sizes, shape):
    started, finished = {**EVENTS[0], "nodes": 3}, EVENTS[1]
    del started["world_size"]
    ranks = [
        {**finished, "kind": "ranks", "world_size": world_size, "nodes": nodes} for world_size, nodes in sizes
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in [started, *ranks, finished]))
    page = hpctrain("report", "digits", "-o", "-").stdout
    assert re.findall(r"\d+ ranks? on \d+ nodes?", page) == ([shape] if shape else [])
    (attempt,) = json.loads(hpctrain("report", "digits", "--json").stdout)["attempts"]
    assert attempt["world_size"] == (4 if shape else None)


def test_checkpoints_of_the_script_are_listed_as_such(hpctrain, tmp_path):
    """Files and folders that match `--checkpoints`, or are in the run folder."""
    history = started_run().after(9, "checkpoint", step=None, path=f"{tmp_path}/out/b.pt")
    run = write_run(tmp_path / "r", history.after(1, "finished", state="COMPLETED", exit_code=0))
    run.spec.write_text(make_spec(run.path, checkpoints=f"{tmp_path}/out/*", backend="local").text())
    for hours, file in enumerate(["out/b.pt", "out/a/deep/model.pt", "r/checkpoints/c/model.pt"], start=1):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes(1000 * hours))
        os.utime(tmp_path / "out/a" if "deep" in file else path, (time.time() - 3600 * hours,) * 2)
    listed = hpctrain("checkpoints", "r", "--verify")
    assert listed.returncode == 0
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert lines[0] == ["age", "size", "checkpoint", "of", "the", "script"]
    assert [line[-1] for line in lines[1:]] == ["r/checkpoints/c", "out/a", "out/b.pt"]
    assert [line[-3:-1] for line in lines[1:]] == [["3", "kB"], ["2", "kB"], ["1", "kB"]]
    assert [line[0] for line in lines[1:]] == ["3", "2", "1"]
    assert "can neither verify nor export" in listed.stderr
    records = json.loads(hpctrain("checkpoints", "r", "--json").stdout)
    assert [(record["by_script"], record["step"], record["bytes"]) for record in records] == [
        *((True, None, 3000), (True, None, 2000), (True, None, 1000))
    ]
    page = hpctrain("report", "r", "-o", "-").stdout
    assert "3 checkpoints in the script's own format on disk." in page
    assert f"{tmp_path}/out/a" in page
    assert "still on disk" not in page
    document = json.loads(hpctrain("report", "r", "--json").stdout)
    assert document["checkpoints"] == []
    assert [saved["bytes"] for saved in document["script_checkpoints"]] == [3000, 2000, 1000]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["digit"], "There is no run 'digit'"),
        (["digits", "-o", "nowhere/report.html"], "Cannot write the report to nowhere/report.html"),
        (["digits", "-o", "report.pdf"], "ends in .pdf, which is not a report format"),
        (["digits", "digits"], "--output comparison.html"),
    ],
)
def test_bad_arguments_are_refused(hpctrain, run, args, message):
    result = hpctrain("report", *args)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.ranks
def test_report_of_an_array_compares_its_tasks(hpctrain, tmp_path):
    submitted = hpctrain("submit", "--backend", "local", "--array", "0-1", "--run-dir", "a", "train.py")
    assert submitted.returncode == 0, submitted.stderr
    assert hpctrain("wait", "a").returncode == 0
    documents = json.loads(hpctrain("report", "a", "--json").stdout)
    assert [document["run_id"] for document in documents] == ["a/task-0", "a/task-1"]
    assert {document["state"] for document in documents} == {"COMPLETED"}
    assert hpctrain("report", "a").stdout == "Report written to a/report.html\n"
    assert "Comparison of 2 runs" in RunDir(tmp_path / "a").report.read_text()
    result = hpctrain("report", "a", "a/task-1")
    assert (result.returncode, "Comparing 3 runs requires an output file" in result.stderr) == (2, True)
    assert hpctrain("report", "a/task-1").returncode == 0
    assert RunDir(tmp_path / "a").task(1).report.exists()


@pytest.mark.ranks
def test_cancelled_run_is_reported_as_cancelled_after_its_supervisor_was_killed(hpctrain, tmp_path):
    """Only the cancel request is left; it is removed when the run is submitted again."""
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(60)\n")
    submit = ("submit", "--backend", "local", "--run-dir", "r")
    assert hpctrain(*submit, "wait.py").returncode == 0
    run = RunDir(tmp_path / "r")
    wait_for(
        lambda: any(event["kind"] == "started" for event in read_json_lines(run.events)), 30, "the ranks"
    )
    run.cancel_request.touch()
    kill_run(run)
    report = json.loads(hpctrain("report", "r", "--json").stdout)
    assert (report["state"], report["attempts"][0]["end"]) == ("CANCELLED", "cancelled")
    assert hpctrain(*submit, "train.py").returncode == 0
    assert hpctrain("wait", "r").returncode == 0
    report = json.loads(hpctrain("report", "r", "--json").stdout)
    ends = [(attempt["end"], attempt["followed_by"]) for attempt in report["attempts"]]
    assert ends == [("cancelled", "submission"), ("completed", None)]
    assert "lost job" not in hpctrain("report", "r", "-o", "-").stdout


def kill_run(run: RunDir) -> None:
    """Kill supervisor and ranks, as the failure of a node does."""
    pids = [
        int(next(event["job_id"] for event in read_json_lines(run.events) if event["kind"] == "submitted"))
    ]
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids.extend(map(int, children))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_locked(run.lock), 30, "the end of the supervisor")


def spec_of(argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the `spec.yaml` that `submit` would write, without the run's name."""
    # click keeps the help option of a command's first context, which the group defines.
    group = click.Context(cli, help_option_names=["-h", "--help"])
    params = submit.command.make_context("submit", list(argv), parent=group).params
    options = {name: value for name, value in params.items() if name in option_names()}
    settings = resolve_options(options, source=COMMAND_LINE_SOURCE, assignments=(), environ={}, cwd=folder)
    spec = build_spec(
        params["script"],
        params["args"],
        settings.options,
        backend="slurm",
        cwd=folder,
        python="/usr/bin/python3",
    )
    return {**to_builtins(spec), "run_id": "", "run_dir": ""}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--nodes", "2", "--gpus-per-node", "h100:4", "--cpus-per-task", "3", "--time", "1-02:03:04"],
        ["--ntasks-per-node", "3", "--name", "a b", "--env", "X=1 2", "--env", "Y=$(touch z)"],
        ["--module", "cuda", "--setup", "echo 'hi'", "--stop-before-limit", "33", "--max-failures", "7"],
        [
            "--partition=gpu",
            "--exclusive",
            "--sbatch=hint=x",
            "--constraint=a&b",
            "--mem=4G",
            "--comment=it's",
        ],
        ["--time", "unlimited", "--sbatch", "profile=task"],
        ["--launcher", "torchrun", "--set", "rdzv_backend=etcd-v2", "--set", "rdzv_endpoint=h:2379"],
        ["--checkpoints", "ckpt/*.pt", "--hang-timeout", "never"],
        ["--array", "0-3%2", "--resume-mode", "successor", "--set", "gpu_request_style=gpus-per-node"],
    ],
)
def test_resubmit_command_reproduces_the_spec(tmp_path, options):
    first = spec_of([*options, "train.py", "--lr", "0.1", "a 'b' $c", "", "--name=x"], tmp_path)
    cd, command = resubmit_command(first)[-2:]
    assert shlex.split(cd) == ["cd", str(tmp_path)]
    assert shlex.split(command)[:2] == ["hpctrain", "submit"]
    assert spec_of(shlex.split(command)[2:], tmp_path) == first


def test_every_option_is_repeated():
    # The shape contains gpus_per_task, and the options those of files.
    not_repeated = {"gpus_per_task", "config", "profile", "run_dir", "runs_dir"}
    assert resume._values({}, started=True).keys() == all_options().keys() - not_repeated


@pytest.mark.parametrize("spec", [{}, {"script": 3, "workdir": "/"}, {"script": "/a.py"}])
def test_no_resubmit_command_without_a_complete_spec(spec):
    assert resubmit_command(spec) == []
