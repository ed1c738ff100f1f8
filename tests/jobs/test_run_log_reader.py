"""Logs of ranks as one stream, which a new reader continues at the last mark."""

import json
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.runs.run_log_reader import (
    EventLine,
    LogFilter,
    LogMark,
    LogPosition,
    RankLogReader,
    RunLogReader,
)
from hpctrain.rundir import RunDir
from hpctrain.supervisor.workers.batch_launcher import link_own_log


class Attempt:
    """An attempt with ranks that print on request."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.run = RunDir(folder)
        self.run.attempt_logs(0).mkdir(parents=True)
        self.run.log_event("started", 0, world_size=world_size, nodes=1)

    def write(self, rank: int, text: str, at: float | None = None, node: int = 0) -> None:
        """Append text to a rank's log; with `at`, add an entry to the log index."""
        log = self.run.rank_log(0, rank)
        with open(log, "a", newline="") as file:
            file.write(text)
        if at is not None:
            entry = {"time": at, "rank": rank, "bytes": log.stat().st_size}
            with open(self.run.log_index(0, node), "a") as file:
                file.write(json.dumps(entry) + "\n")

    def logs(self, *ranks: int) -> RankLogReader:
        return RankLogReader(self.run, 0, ranks)


def read_all(logs: RankLogReader) -> str:
    return "".join([*logs.read_past(), *logs.read_rest()])


def test_existing_output_is_merged_by_time(tmp_path):
    attempt = Attempt(tmp_path / "r", 4)
    attempt.write(1, "first\n", at=10, node=0)
    attempt.write(3, "second\n", at=11, node=1)
    attempt.write(0, "third\nfourth\n", at=12, node=0)
    attempt.write(3, "fifth\n", at=13, node=1)
    attempt.write(1, "sixth, not noted any more\n")
    assert read_all(attempt.logs()).splitlines() == [
        "[1] first",
        "[3] second",
        "[0] third",
        "[0] fourth",
        "[3] fifth",
        "[1] sixth, not noted any more",
    ]


def test_selected_ranks_are_shown_and_a_single_one_without_prefix(tmp_path):
    attempt = Attempt(tmp_path / "r", 12)
    for rank in (10, 2, 0):
        attempt.write(rank, f"I am {rank}\n", at=10 - rank)
    assert read_all(attempt.logs()) == "[10] I am 10\n[ 2] I am 2\n[ 0] I am 0\n"
    assert read_all(attempt.logs(2, 0)) == "[ 2] I am 2\n[ 0] I am 0\n"
    assert read_all(attempt.logs(2)) == "I am 2\n"


def test_files_of_the_ranks_of_a_batch_script_are_their_logs(tmp_path):
    """Both attempts append to a file per rank; ranks 2 and 3 of the first share a file."""
    attempt = Attempt(tmp_path / "r", 1)
    attempt.write(0, "script\n")
    for number, (rank, name) in enumerate([(0, "a"), (1, "b"), (1, "b"), (2, "c"), (3, "c")], 1):
        (tmp_path / name).write_text(f"in {name}\n")
        attempt.run.own_log(0, rank, number).symlink_to(tmp_path / name)
    assert attempt.run.ranks(0) == [0, 1, 2, 3]
    assert read_all(attempt.logs()).splitlines() == ["script", "[0] in a", "[1] in b", "[2] in c"]
    assert read_all(attempt.logs(0)).splitlines() == ["script", "in a"]
    assert read_all(attempt.logs(3)) == "in c\n"
    assert attempt.run.log_of(0, 1).name == "rank-00001-3.log"
    assert attempt.run.log_of(0, 7).name == "rank-00000.log"
    attempt.run.attempt_logs(1).mkdir()
    link_own_log(attempt.run, 1, 1, 1, str(tmp_path / "b"), (tmp_path / "b").stat().st_size)
    with open(tmp_path / "b", "a") as file:
        file.write("again\n")
    assert read_all(attempt.logs(1)) == "in b\n"
    assert read_all(RankLogReader(attempt.run, 1, (1,))) == "again\n"


def test_lines_are_whole_and_progress_bars_show_their_last_state(tmp_path):
    attempt = Attempt(tmp_path / "r", 2)
    attempt.write(0, "half a ", at=1)
    attempt.write(1, "10%\r20%\r30%", at=2)
    attempt.write(0, "line\r\n", at=3)
    logs = attempt.logs()
    assert list(logs.read_past()) == ["[0] half a line\n"]
    attempt.write(1, "\r100%\nlast words")
    assert list(logs.read_new()) == ["[1] 100%\n"]
    assert list(logs.read_rest()) == ["[1] last words\n"]
    assert list(logs.read_rest()) == []


def test_invalid_log_index_loses_no_output(tmp_path):
    attempt = Attempt(tmp_path / "r", 2)
    attempt.write(0, "one\n", at=1)
    with open(attempt.run.log_index(0, 0), "a") as notes:
        notes.write('{"time": 2, "rank": 0, "bytes": 99999}\n{"time": 3}\n[]\n{"torn')
    attempt.write(0, "two\n")
    assert read_all(attempt.logs()) == "[0] one\n[0] two\n"


@given(
    writes=st.lists(
        st.tuples(st.integers(0, 3), st.text("ab\né", max_size=6), st.booleans()), min_size=1, max_size=40
    ),
    seen_at=st.integers(0, 40),
)
def test_no_line_is_lost_repeated_or_reordered(tmp_path_factory, writes, seen_at):
    attempt = Attempt(tmp_path_factory.mktemp("runs") / "r", 4)
    for rank in range(4):
        attempt.write(rank, "")
    logs, output = None, []
    for moment, (rank, text, indexed) in enumerate(writes):
        if moment == seen_at:
            logs = attempt.logs()
            output += logs.read_past()
        attempt.write(rank, text, at=moment if indexed else None, node=rank // 2)
        if logs is not None:
            output += logs.read_new()
    if logs is None:
        logs = attempt.logs()
        output += logs.read_past()
    output += logs.read_rest()
    lines = [line for line in "".join(output).split("\n") if line]
    for rank in range(4):
        written = "".join(text for writer, text, _ in writes if writer == rank)
        expected = written.removesuffix("\n").split("\n") if written else []
        assert [line[4:] for line in lines if line.startswith(f"[{rank}]")] == expected


def write_stages(run: RunDir, world_size: int, stage: int) -> None:
    """Write what the ranks print and the supervisor records in one of five stages."""
    match stage:
        case 0:
            run.path.mkdir()
            run.log_event("submitted", 0, job_id="1", backend="local")
            run.log_event("started", 0, world_size=world_size, nodes=1)
        case 1 | 2:
            for rank in range(world_size):
                text = f"attempt 0 rank {rank} stage {stage} é\nhalf a line of {rank} "
                append(run.rank_log(0, rank), text.encode() + b"\xff\xc3")
        case 3:
            run.log_event("failure", 0, cause="a crash", rank=-1)
            run.log_event("restart", 0)
            run.log_event("started", 1, world_size=world_size, nodes=1)
        case 4:
            for rank in range(world_size):
                append(run.rank_log(1, rank), f"attempt 1 rank {rank}\nno newline".encode())


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def follow(run: RunDir, world_size: int, cut: int | None) -> tuple[list[str], int]:
    """Return the shown texts, and the number of items; a new reader takes over after `cut` items."""
    shown, position, count = [], LogPosition(), 0
    reader = RunLogReader(run, LogFilter(), whole=False)
    for stage in range(7):
        write_stages(run, world_size, stage)
        while True:
            items = chain(reader.read(), reader.read_rest() if stage == 6 else ())
            is_cut = False
            for item in items:
                if isinstance(item, LogMark):
                    position.advance(item)
                else:
                    shown.append(f"== {item.line}\n" if isinstance(item, EventLine) else item.text)
                    position.advance(item.mark)
                count += 1
                if is_cut := count == cut:
                    break
            if not is_cut:
                break
            known = LogPosition.from_json(json.loads(json.dumps(asdict(position))))
            reader = RunLogReader(run, LogFilter(), whole=False, position=known)
    return shown, count


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_reader_continues_at_the_mark(tmp_path: Path, world_size: int):
    whole, count = follow(RunDir(tmp_path / "whole"), world_size, None)
    assert count > 6
    expected = sorted("".join(whole).splitlines())
    for cut in range(1, count + 1):
        shown, _ = follow(RunDir(tmp_path / str(cut)), world_size, cut)
        lines = "".join(shown).splitlines()
        assert sorted(lines) == expected, f"cut after item {cut}"
        attempts = [line.split()[2] for line in lines if "] attempt" in line]
        assert all(first <= second for first, second in pairwise(attempts))
