"""Exchange of records between ranks on separate nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_on_ranks

from hpctrain.checkpoint.tier.rank_record import RankRecord, read_record
from hpctrain.cluster import detect
from hpctrain.runtime.distributed_context import init_distributed
from hpctrain.training.saving.record_exchange import RecordExchange

pytestmark = pytest.mark.ranks


ENV = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}


def open_files(folder: Path) -> tuple[int, RankRecord, RecordExchange, Path]:
    """Return this rank, its record, the exchange, and the copy of the other rank's record."""
    ranks = detect({**os.environ, "GROUP_RANK": os.environ["RANK"]})
    exchange = RecordExchange(init_distributed(ranks, os.environ))
    copy = folder / f"copy-{exchange.source}"
    exchange.open(copy)
    return ranks.rank, RankRecord(folder / f"record-{ranks.rank}", []), exchange, copy


def exchange_until_a_rank_is_killed(folder: Path) -> dict[int, Any]:
    rank, record, exchange, copy = open_files(folder)
    for step in (1, 2, 3, 4):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        record.write(step, {"rank": rank}, with_tensors=False)
        exchange.begin(record.read_slot(step))
        exchange.end()
    return read_record(copy)


def test_the_copy_of_the_record_of_a_killed_rank_is_kept(tmp_path):
    copy, _ = run_on_ranks(exchange_until_a_rank_is_killed, tmp_path, env=ENV, killed=[1])
    assert copy == {1: {"rank": 1}, 2: {"rank": 1}}


def exchange_with_a_rank_without_record(folder: Path) -> dict[int, Any]:
    rank, record, exchange, copy = open_files(folder)
    record.write(1, {"rank": rank}, with_tensors=False)
    if rank == 0:
        exchange.begin(record.read_slot(1))
    exchange.end()
    return read_record(copy)


def test_a_rank_without_a_record_does_not_block_the_others(tmp_path):
    copies = run_on_ranks(exchange_with_a_rank_without_record, tmp_path, env=ENV)
    assert copies == [{}, {1: {"rank": 0}}]
