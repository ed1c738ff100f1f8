"""Lines that a crash or a full disk has cut: the next one stands alone, and readers pass them over."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from helpers import run_command

from hpctrain.files import append_json_line, append_line, end_torn_line, read_json_lines
from hpctrain.jobs.tail import RecordTail, last_records
from hpctrain.rundir import RunDir


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A file whose second line was cut before another was written."""
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1})
    with open(path, "a") as file:
        file.write('{"step": ')
    append_json_line(path, {"step": 2})
    return path


def test_a_line_behind_a_torn_one_stands_alone(torn):
    assert torn.read_text() == '{"step": 1}\n{"step": \n{"step": 2}\n'


def test_no_empty_lines_are_written_where_nothing_is_torn(tmp_path):
    path = tmp_path / "log"
    for line in ("one", "zwölf \ud800"):
        append_line(path, line)
        end_torn_line(path)
    assert path.read_text() == "one\nzwölf \\ud800\n"


@pytest.mark.parametrize(
    "read",
    [read_json_lines, lambda path: RecordTail(path).read(), lambda path: reversed(list(last_records(path)))],
)
def test_readers_pass_over_a_torn_line_and_say_so_once(torn, read, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [record["step"] for record in read(torn)] == [1, 2]
    (said,) = caplog.messages
    assert str(torn) in said
    assert "torn" in said


def test_a_last_line_without_an_end_may_be_about_to_be_written(tmp_path, caplog):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert list(read_json_lines(path)) == list(last_records(path)) == RecordTail(path).read() == [{"step": 1}]
    assert caplog.messages == []


def test_a_run_whose_record_is_torn_goes_on_at_once(tmp_path):
    run = RunDir(tmp_path / "run")
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    hpctrain = [sys.executable, "-m", "hpctrain"]
    submit = [*hpctrain, "submit", "--backend", "local", "--run-dir", run.path, "--follow", script]
    run_command(submit, timeout=60)
    with open(run.events, "a") as file:
        file.write('{"time": 17')
    run_command(submit, timeout=60)
    kinds = [event["kind"] for event in run.read_events()]
    assert kinds == ["submitted", "started", "finished"] * 2
    status = run_command([*hpctrain, "status", run.path, "--json"])
    assert json.loads(status.stdout)["state"] == "COMPLETED"
