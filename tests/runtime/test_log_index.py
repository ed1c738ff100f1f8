"""The log index that a rank writes for its standard output."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines

_RANK = """
import os, sys
from pathlib import Path
from hpctrain.runtime import worker
worker._LOG_INDEX_INTERVAL_S = 0.02
worker.start_log_index(Path(sys.argv[1]), 3)
for line in sys.stdin:
    os.write(1, line.encode())
"""


def _has_entries(path: Path, count: int) -> bool:
    return len(list(read_json_lines(path))) == count


def test_log_index_has_times_and_lengths(tmp_path):
    index = tmp_path / "times.jsonl"
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(index)], stdin=subprocess.PIPE, stdout=log, env=environment()
        ) as rank,
    ):
        assert rank.stdin is not None
        for count in (1, 2):
            rank.stdin.write(b"hello\n")
            rank.stdin.flush()
            wait_for(partial(_has_entries, index, count), 20, "a note")
    records = list(read_json_lines(index))
    assert [(record["rank"], record["bytes"]) for record in records] == [(3, 6), (3, 12)]
    assert records[0]["time"] <= records[1]["time"]
