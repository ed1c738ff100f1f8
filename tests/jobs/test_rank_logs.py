from __future__ import annotations

import builtins
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.jobs.runs.rank_logs import RankLogReader
from hpctrain.records import log_tail
from hpctrain.rundir import RunDir


class Attempt:
    """An attempt whose ranks print when a test says so."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.run = RunDir(folder)
        self.run.attempt_logs(0).mkdir(parents=True)
        self.run.log_event("started", 0, world_size=world_size, nodes=1)

    def prints(self, rank: int, text: str, at: float | None = None, node: int = 0) -> None:
        """Let a rank print and, with `at`, note when."""
        log = self.run.rank_log(0, rank)
        with open(log, "a", newline="") as file:
            file.write(text)
        if at is not None:
            note = {"time": at, "rank": rank, "bytes": log.stat().st_size}
            with open(self.run.log_index(0, node), "a") as file:
                file.write(json.dumps(note) + "\n")

    def logs(self, *ranks: int) -> RankLogReader:
        return RankLogReader(self.run, 0, ranks)


def past(logs: RankLogReader) -> str:
    return "".join([*logs.read_past(), *logs.read_rest()])


def test_what_is_there_comes_in_the_order_of_time(tmp_path):
    attempt = Attempt(tmp_path / "r", 4)
    attempt.prints(1, "first\n", at=10, node=0)
    attempt.prints(3, "second\n", at=11, node=1)
    attempt.prints(0, "third\nfourth\n", at=12, node=0)
    attempt.prints(3, "fifth\n", at=13, node=1)
    attempt.prints(1, "sixth, not noted any more\n")
    assert past(attempt.logs()).splitlines() == [
        "[1] first",
        "[3] second",
        "[0] third",
        "[0] fourth",
        "[3] fifth",
        "[1] sixth, not noted any more",
    ]


def test_some_ranks_are_picked_and_one_alone_needs_no_name(tmp_path):
    attempt = Attempt(tmp_path / "r", 12)
    for rank in (10, 2, 0):
        attempt.prints(rank, f"I am {rank}\n", at=10 - rank)
    assert past(attempt.logs()) == "[10] I am 10\n[ 2] I am 2\n[ 0] I am 0\n"
    assert past(attempt.logs(2, 0)) == "[ 2] I am 2\n[ 0] I am 0\n"
    assert past(attempt.logs(2)) == "I am 2\n"


def test_a_run_of_one_rank_is_shown_as_it_is(tmp_path):
    attempt = Attempt(tmp_path / "r", 1)
    attempt.prints(0, "50%\r100%\nno end")
    logs = attempt.logs()
    assert list(logs.read_past()) == ["50%\r100%\nno end"]


def test_lines_are_whole_and_progress_bars_show_their_last_state(tmp_path):
    attempt = Attempt(tmp_path / "r", 2)
    attempt.prints(0, "half a ", at=1)
    attempt.prints(1, "10%\r20%\r30%", at=2)
    attempt.prints(0, "line\r\n", at=3)
    logs = attempt.logs()
    assert list(logs.read_past()) == ["[0] half a line\n"]
    attempt.prints(1, "\r100%\nlast words")
    assert list(logs.read_new()) == ["[1] 100%\n"]
    assert list(logs.read_rest()) == ["[1] last words\n"]
    assert list(logs.read_rest()) == []


def test_ranks_that_begin_later_are_found(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path / "r", 2)
    attempt.prints(0, "here\n")
    logs = attempt.logs()
    assert list(logs.read_past()) == ["[0] here\n"]
    attempt.prints(1, "here, too\n")
    monkeypatch.setattr("hpctrain.jobs.runs.rank_logs._LISTING_INTERVAL_S", 0.0)
    logs._next_listing = 0.0
    assert list(logs.read_new()) == ["[1] here, too\n"]


def test_notes_that_make_no_sense_cost_no_text(tmp_path):
    attempt = Attempt(tmp_path / "r", 2)
    attempt.prints(0, "one\n", at=1)
    with open(attempt.run.log_index(0, 0), "a") as notes:
        notes.write('{"time": 2, "rank": 0, "bytes": 99999}\n{"time": 3}\n[]\n{"torn')
    attempt.prints(0, "two\n")
    assert past(attempt.logs()) == "[0] one\n[0] two\n"


@given(
    prints=st.lists(
        st.tuples(st.integers(0, 3), st.text("ab\né", max_size=6), st.booleans()), min_size=1, max_size=40
    ),
    seen_at=st.integers(0, 40),
)
def test_no_line_is_lost_doubled_or_out_of_its_ranks_order(tmp_path_factory, prints, seen_at):
    attempt = Attempt(tmp_path_factory.mktemp("runs") / "r", 4)
    for rank in range(4):
        attempt.prints(rank, "")
    logs, shown = None, []
    for moment, (rank, text, noted) in enumerate(prints):
        if moment == seen_at:
            logs = attempt.logs()
            shown += logs.read_past()
        attempt.prints(rank, text, at=moment if noted else None, node=rank // 2)
        if logs is not None:
            shown += logs.read_new()
    if logs is None:
        logs = attempt.logs()
        shown += logs.read_past()
    shown += logs.read_rest()
    lines = [line for line in "".join(shown).split("\n") if line]
    for rank in range(4):
        whole = "".join(text for who, text, _ in prints if who == rank)
        expected = whole.removesuffix("\n").split("\n") if whole else []
        assert [line[4:] for line in lines if line.startswith(f"[{rank}]")] == expected


def test_many_ranks_cost_a_bounded_number_of_looks_and_no_open_files(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path / "r", 512)
    for rank in range(512):
        attempt.prints(rank, "begin\n")
    before = len(os.listdir("/proc/self/fd"))
    logs = attempt.logs()
    assert len(list(logs.read_past())) == 512
    assert len(os.listdir("/proc/self/fd")) == before

    calls: Counter[str] = Counter()

    def count(module: object, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(log_tail.os, "stat")
    count(builtins, "open")
    logs._next_listing = float("inf")
    for _ in range(20):
        assert list(logs.read_new()) == []
    assert calls == {"stat": 20 * 64}
    calls.clear()
    for rank in (3, 77, 511):
        with open(attempt.run.rank_log(0, rank), "a") as file:
            file.write("news\n")
    calls.clear()
    news = [line for _ in range(8) for line in logs.read_new()]
    assert sorted(news) == ["[  3] news\n", "[ 77] news\n", "[511] news\n"]
    assert calls["stat"] == 512
    # Each of the three is read until nothing more comes.
    assert calls["open"] == 2 * 3


@pytest.mark.parametrize("size", [0, 10_000_000])
def test_a_large_log_is_read_in_parts(tmp_path, size):
    attempt = Attempt(tmp_path / "r", 2)
    line = "x" * 99 + "\n"
    attempt.prints(0, line * (size // 100), at=5, node=0)
    attempt.prints(1, "first\n", at=4, node=1)
    first, *pieces = attempt.logs().read_past()
    assert first == "[1] first\n"
    assert max(map(len, pieces), default=0) < 5_000_000
    assert "".join(pieces) == f"[0] {line}" * (size // 100)
