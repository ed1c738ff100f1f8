"""A reader that starts at the last mark continues without losing or repeating a line, wherever it was cut."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path

import pytest

from hpctrain.jobs.runs.run_log_reader import EventLine, LogFilter, LogMark, LogPosition, RunLogReader
from hpctrain.rundir import RunDir

ALL = LogFilter()


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
    reader = RunLogReader(run, ALL, whole=False)
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
            reader = RunLogReader(run, ALL, whole=False, position=known)
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
