"""Files: torn lines are skipped, and private files are private."""

import json
import logging
import os
import stat
import sys
from collections import deque
from pathlib import Path

import pytest
from helpers.commands import run_command

from hpctrain.files import (
    append_json_line,
    append_lines,
    create_atomic,
    make_folder,
    own_file,
    read_json_lines,
    read_lines,
    terminate_partial_line,
    try_lock,
    write_atomic,
)
from hpctrain.records.call_payload import CallPayload
from hpctrain.records.log_tail import RecordTail, read_last_records
from hpctrain.rundir import RunDir


@pytest.fixture
def torn_file(tmp_path: Path) -> Path:
    """A file whose second line was cut before another was written."""
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1})
    with open(path, "a") as file:
        file.write('{"step": ')
    append_json_line(path, {"step": 2})
    return path


def test_line_that_a_writer_completes_meanwhile_is_not_damaged(tmp_path, caplog):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")

    def decode(line: bytes) -> str:
        if line == b"tw":
            with open(path, "ab") as file:
                file.write(b"o\n")
            raise ValueError
        return line.decode()

    assert list(read_lines(path, decode)) == ["one\n"]
    assert list(read_lines(path, bytes.decode)) == ["one\n", "two\n"]
    assert not caplog.text


def test_no_empty_lines_are_written_without_torn_ones(tmp_path):
    path = tmp_path / "log"
    for line in ("one", "zwölf \ud800"):
        append_lines(path, deque([line]))
        terminate_partial_line(path)
    assert path.read_text() == "one\nzwölf \\ud800\n"


@pytest.mark.parametrize(
    "read",
    [
        read_json_lines,
        lambda path: RecordTail(path, dict).read(),
        lambda path: reversed(list(read_last_records(path, dict))),
    ],
)
def test_readers_skip_a_torn_line_with_one_warning(torn_file, read, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [record["step"] for record in read(torn_file)] == [1, 2]
    (message,) = caplog.messages
    assert str(torn_file) in message
    assert "torn" in message


@pytest.mark.ranks
def test_run_with_a_torn_record_continues(tmp_path):
    run = RunDir(tmp_path / "run")
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    hpctrain = [sys.executable, "-m", "hpctrain"]
    submit = [*hpctrain, "submit", "--backend", "local", "--run-dir", run.path, "--follow", script]
    run_command(submit, timeout=60)
    with open(run.events, "a") as file:
        file.write('{"time": 17')
    run_command(submit, timeout=60)
    kinds = [event["kind"] for event in read_json_lines(run.events)]
    assert kinds == ["submitted", "started", "finished"] * 2
    status = run_command([*hpctrain, "status", run.path, "--json"])
    assert json.loads(status.stdout)["state"] == "COMPLETED"


@pytest.mark.parametrize(("umask", "shared", "folder"), [(0o002, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_only_the_owner_writes_under_any_umask(tmp_path, umask, shared, folder):
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "open" / "inner")
        make_folder(tmp_path / "closed", private=True)
        write_atomic(tmp_path / "report.html", "")
        append_json_line(tmp_path / "events.jsonl", {})
        write_atomic(tmp_path / "spec.yaml", "", private=True)
        CallPayload(b"", ()).write(tmp_path / "function.pkl")
        os.close(try_lock(tmp_path / "lock"))
        with open(tmp_path / "log", "w", opener=own_file):
            pass
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes.pop("open") == 0o777 & ~umask  # a parent, such as the folder of all runs
    assert modes == {
        "inner": folder,
        "closed": 0o700,
        "report.html": shared,
        "events.jsonl": shared,
        "log": shared,
        "spec.yaml": 0o600,
        "function.pkl": 0o600,
        "lock": 0o600,
    }


def test_private_file_replaces_a_readable_one(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("old")
    path.chmod(0o644)
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_text("left by a process that was killed")
    write_atomic(path, "new", private=True)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["spec.yaml"]


def test_existing_file_survives_a_writer_killed_before_its_cleanup(tmp_path):
    """The temporary name is then a second link to the file, and must not be opened for writing."""
    path = tmp_path / "chain" / "after-7"
    assert create_atomic(path, b"8", "8")
    os.link(path, path.with_name(".after-7.8"))
    reader = path.open("rb")
    assert not create_atomic(path, b"other", "8")
    with reader:
        assert (reader.read(), path.read_bytes()) == (b"8", b"8")
    assert os.listdir(path.parent) == ["after-7"]
