"""Advice in the records of failures."""

from __future__ import annotations

import pytest

from hpctrain.rundir import ATTEMPT_VARIABLE
from hpctrain.runtime.failure_file import failure_record

#: The message of Lightning's SaveConfigCallback.
SAVE_CONFIG = (
    "SaveConfigCallback expected logs/config.yaml to NOT exist. Aborting to avoid overwriting results"
)


@pytest.mark.parametrize(
    ("error", "attempt", "advises"),
    [
        (RuntimeError(SAVE_CONFIG), "1", True),
        (FileExistsError(17, "File exists", "runs/a"), "2", True),
        (ValueError("Output directory (out) already exists and is not empty."), "1", True),
        (RuntimeError(SAVE_CONFIG), "0", False),
        (RuntimeError("shapes do not match"), "1", False),
    ],
)
def test_refused_output_of_an_earlier_attempt_is_explained(error, attempt, advises):
    message = failure_record(error, {ATTEMPT_VARIABLE: attempt})["message"]
    assert message.startswith(str(error))
    assert ("output may be that of an earlier attempt" in message) == advises
