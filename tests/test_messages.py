"""Messages between ranks: what arrives, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked

from hpctrain import messages
from hpctrain.errors import Unauthenticated

SCRIPT = Path(__file__).with_name("messages_on_ranks.py")
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def on_two_ranks(*words: object) -> str:
    return run_forked(SCRIPT, [str(word) for word in words], VARIABLES, ranks=2)


def test_values_arrive_as_they_are_and_others_are_refused_on_all_ranks():
    assert "a message has 428 bytes on a rank, but the limit is 300" in on_two_ranks("everything")


def test_a_rank_with_another_secret_is_named_with_the_store_and_who_is_connected_to_it():
    printed = on_two_ranks("foreign")
    assert printed.startswith("Unauthenticated the store's entry 'hpctrain/0/devices/seats/")
    assert "store at 127.0.0.1:" in printed


def test_a_program_that_takes_the_place_of_a_rank_in_the_group_is_found():
    printed = on_two_ranks("intruder")
    assert printed.startswith(
        "Unauthenticated rank 1 of 2 did not prove the secret of this run: another program"
    )
    assert "store at 127.0.0.1:" in printed


def test_an_address_that_a_stranger_has_changed_in_the_store_is_refused():
    """So no relay between two ranks is possible."""
    printed = on_two_ranks("rewritten")
    assert printed.startswith("Unauthenticated the store's entry 'hpctrain/0/0//cpu//0/1' was written by")


def test_a_rank_that_does_not_prove_the_secret_in_time_is_named():
    printed = on_two_ranks("silent")
    assert printed.startswith("RendezvousError rank 0 waited ")
    assert " s for rank 1 to prove the secret: " in printed
    assert "store at 127.0.0.1:" in printed


@pytest.mark.parametrize("how", ["gather", "broadcast"])
def test_a_changed_length_is_refused(how):
    printed = on_two_ranks("length", how)
    assert printed.startswith("Unauthenticated the length of a message from member 1 has a wrong")


def test_a_message_without_the_right_code_is_refused(tmp_path):
    assert "member 1 has a wrong authentication code" in on_two_ranks("forged", tmp_path / "evil")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"1",
        b"{}",
        b'{"value": {"tensor": 3}, "tensors": []}',
        b'{"value": {"dtype": "load"}, "tensors": []}',
        b'{"value": {"reduce": []}, "tensors": []}',
        b'{"value": {"a": 1, "b": 2}, "tensors": []}',
        b'{"value": {"dict": [[[1], 2]]}, "tensors": []}',
        json.dumps({"value": {"tuple": None}}).encode(),
    ],
    ids=range(9),
)
def test_a_text_that_no_rank_sends_is_refused(text):
    """Without a secret, a stranger can send any."""
    with pytest.raises(Unauthenticated, match="in an invalid form"):
        messages._unpack(text, [], "a message")
