"""The states of a thousand runs take one Slurm query."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers.commands import environment, run_command

from hpctrain.files import append_json_line
from hpctrain.jobs.runs.run import list_runs, query_statuses
from hpctrain.rundir import RunDir

NUM_RUNS = 1000


def count_calls(environ: Mapping[str, str], folder: Path, *commands: str) -> dict[str, str]:
    """Return variables under which each call of a Slurm command adds a line to `folder`/calls."""
    folder.mkdir()
    for command in commands:
        wrapper = folder / command
        wrapper.write_text(f'#!/bin/sh\necho {command} >>{folder}/calls\nexec {shutil.which(command)} "$@"\n')
        wrapper.chmod(0o755)
    return {**environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def calls(slurm, tmp_path) -> tuple[dict[str, str], Path]:
    folder = tmp_path / "bin"
    environ = count_calls(environment(slurm.env), folder, "squeue", "sacct", "scontrol")
    return environ, folder / "calls"


@pytest.fixture
def held_jobs(slurm, tmp_path) -> Iterator[list[str]]:
    """As many queued jobs as there are runs."""
    (tmp_path / "runs").mkdir()
    options = (
        f"--chdir={tmp_path}/runs",
        "--parsable",
        "--hold",
        f"--array=0-{NUM_RUNS - 1}",
        "--output=/dev/null",
        "--wrap=true",
    )
    job_id = run_command(["sbatch", *options], slurm.env).stdout.strip()
    yield [f"{job_id}_{index}" for index in range(NUM_RUNS)]
    run_command(["scancel", job_id], slurm.env)


def create_runs(job_ids: list[str], folder: Path) -> None:
    for number, job_id in enumerate(job_ids):
        run = RunDir(folder / f"task-{number}")
        run.path.mkdir(parents=True)
        run.spec.touch()
        record = {"attempt": 0, "kind": "submitted", "job_id": job_id, "backend": "slurm"}
        append_json_line(run.events, {"time": 1.7e9, **record})


def test_thousand_queued_runs_take_one_squeue(calls, held_jobs, tmp_path):
    environ, log = calls
    create_runs(held_jobs, tmp_path / "runs")
    states = Counter(status.state for status in query_statuses(list_runs(tmp_path / "runs", environ)))
    assert states == {"PENDING": NUM_RUNS}
    assert log.read_text().split() == ["squeue"]
    log.unlink()
    result = run_command([sys.executable, "-m", "hpctrain", "list", "--json"], environ, cwd=tmp_path)
    assert Counter(status["state"] for status in json.loads(result.stdout)) == {"PENDING": NUM_RUNS}
    assert log.read_text().split() == ["squeue"]


def test_thousand_unknown_runs_take_one_query_of_each_kind(calls, tmp_path):
    environ, log = calls
    create_runs([str(50_000_000 + number) for number in range(NUM_RUNS)], tmp_path / "runs")
    for folder in (tmp_path / "runs").iterdir():
        os.utime(folder / "events.jsonl", (0, 1.7e9))
    states = Counter(status.state for status in query_statuses(list_runs(tmp_path / "runs", environ)))
    # Silent for years: these have ended, whatever Slurm reports.
    assert states == {"FAILED": NUM_RUNS}
    assert sorted(log.read_text().split()) == ["sacct", "scontrol", "scontrol", "squeue"]
