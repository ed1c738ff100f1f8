"""Ranks of a script without the Trainer stop after the same step, in any order of requests and answers."""

import queue
import signal
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.record_types import RankMessage
from hpctrain.runtime.rank_activity import RankActivity
from hpctrain.runtime.stopping import agreed_stop as module
from hpctrain.runtime.stopping.agreed_stop import AgreedStop, agreement_timeout_s
from hpctrain.supervisor.workers.rank_monitor import StopAgreement


@pytest.fixture
def activity(monkeypatch):
    activity = RankActivity()
    monkeypatch.setattr(module, "activity", activity)
    return activity


def test_rank_that_counts_no_steps_cannot_agree(activity):
    stop = AgreedStop()
    stop.is_enabled = True
    assert not stop.request(signal.SIGTERM)
    assert stop.prepare() is None
    activity.step = 1
    assert stop.request(signal.SIGTERM)
    assert not stop.request(signal.SIGTERM)
    activity.is_managed = True
    assert stop.prepare() is None


def test_rank_waits_after_the_step_in_progress_until_the_common_step(activity):
    stop = AgreedStop()
    stop.is_enabled, activity.step = True, 7
    assert not stop.after_step()
    assert stop.prepare() == 8
    assert not stop.after_step()
    activity.step = 8
    stopped = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: stopped.put(stop.after_step()))
    thread.start()
    with pytest.raises(queue.Empty):
        stopped.get(timeout=0.1)
    stop.stop_after(9)
    assert stopped.get(timeout=120) is False
    activity.step = 9
    assert stop.after_step()
    thread.join()


def test_rank_continues_without_agreement(activity, monkeypatch):
    monkeypatch.setattr(module, "AGREEMENT_TIMEOUT_S", 0.05)
    for answer in (lambda stop: stop.stop_after(None), lambda stop: None):
        stop = AgreedStop()
        stop.is_enabled, activity.step = True, 1
        stop.prepare()
        answer(stop)
        activity.step = 3
        assert not stop.after_step()
        assert not stop.request(signal.SIGTERM)


@pytest.mark.slow
@given(st.data(), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_all_ranks_reach_the_common_step_and_none_passes_it(data, world_size):
    """Ranks in lockstep: one is at most one step ahead of another. Steps and messages happen in any order."""
    ranks = [SimpleNamespace(step=5, held=None, until=None, inbox=[]) for _ in range(world_size)]
    common = []

    def send(message):
        common.extend([message["stop_after"]] if "stop_after" in message else [])
        for rank in ranks:
            rank.inbox.append(message)

    agreement = StopAgreement(world_size, send)
    agreement.on_message(data.draw(st.integers(0, world_size - 1)), RankMessage(stop=True))
    while any(rank.step != rank.until for rank in ranks):
        possible = [(index, "receive") for index, rank in enumerate(ranks) if rank.inbox]
        for index, rank in enumerate(ranks):
            is_held = rank.until is None and rank.held is not None and rank.step >= rank.held
            # The step needs the gradients of all ranks.
            needs = all(other.step >= rank.step for other in ranks)
            if not is_held and rank.step != rank.until and needs:
                possible.append((index, "step"))
        assert possible, f"deadlock: {ranks}"
        index, what = data.draw(st.sampled_from(possible))
        rank = ranks[index]
        if what == "step":
            rank.step += 1
        elif "prepare_stop" in (message := rank.inbox.pop(0)):
            rank.held = rank.step + 1
            agreement.on_message(index, RankMessage(can_stop_after=rank.held))
        else:
            rank.until = message["stop_after"]
            assert rank.step <= rank.until
    assert {rank.step for rank in ranks} == set(common)


def test_time_limit_is_a_share_of_the_grace_period():
    assert agreement_timeout_s(signal.SIGTERM, {"HPCTRAIN_STOP_GRACE": "SIGTERM=6,SIGUSR2=120"}) == 2.0
    assert agreement_timeout_s(signal.SIGUSR2, {"HPCTRAIN_STOP_GRACE": "SIGTERM=6,SIGUSR2=120"}) == 10.0
    assert agreement_timeout_s(signal.SIGTERM, {}) == 10.0
