"""Requests for profiles, without a run. `tests/e2e/test_profile.py` profiles runs."""

import json

import click
import pytest

from hpctrain.cli.control import _rank_list
from hpctrain.errors import WaitTimeout
from hpctrain.jobs.runs.profile import ProfileRequest
from hpctrain.jobs.runs.run import Run
from hpctrain.rundir import RunDir


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", [0]), ("0,3", [0, 3]), ("8-11, 3,9", [3, 8, 9, 10, 11]), ("00-01", [0, 1])]
)
def test_rank_list(text, ranks):
    assert _rank_list(None, None, text) == ranks


@pytest.mark.parametrize("text", ["", "x", "3-", "7-0", "-1", "0]x[1", "0-99999999999", "9" * 5000])
def test_invalid_rank_list(text):
    with pytest.raises(click.BadParameter, match="is not a valid list of ranks"):
        _rank_list(None, None, text)


def test_end_of_a_profile_keeps_the_next_request(tmp_path):
    run = Run(RunDir(tmp_path), {})
    request = ProfileRequest(run, number=0, ranks=(0,), num_steps=1, attempt=0)
    for number, exists in ((1, True), (0, False)):
        run.dir.profile_request.write_text(json.dumps({"number": number}))
        with pytest.raises(WaitTimeout):
            request.wait(0, print)
        assert run.dir.profile_request.exists() is exists
