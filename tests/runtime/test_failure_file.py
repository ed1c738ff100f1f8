"""Failure records that name the cause of an exception."""

import os
import signal
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, Dataset

from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.rundir import ATTEMPT_VARIABLE
from hpctrain.runtime.failure_file import failure_record, no_death_handler
from hpctrain.supervisor.failures.root_cause import RankFailure, classify

#: The message of Lightning's SaveConfigCallback.
SAVE_CONFIG = (
    "SaveConfigCallback expected logs/config.yaml to NOT exist. Aborting to avoid overwriting results"
)


class Tensors(Dataset):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return torch.full((10,), index)


def record_of(loader, *, kill: int = 0, reset: bool = False) -> dict[str, Any]:
    """Return the record after one of the workers was killed, or its connection was reset."""
    batches = iter(loader)
    try:
        if kill:
            next(batches)
            os.kill(batches._workers[0].pid, kill)
        if reset:
            batches._try_get_data = reset_connection
        list(batches)
    except Exception as error:  # noqa: BLE001 (its class depends on the moment)
        return failure_record(error, {})
    finally:
        batches._shutdown_workers()
    raise AssertionError("nothing was raised")


def reset_connection(*_):
    raise ConnectionResetError(104, "Connection reset by peer")


def kind_of(record) -> EndKind:
    words = record["error"], record["message"]
    return classify(
        RankFailure(0, "n1", "exception", *words, "x", None, 0.0, classes=tuple(record["classes"]))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reset", "reason", "kind"),
    [
        (signal.SIGKILL, False, "SIGKILL. A common cause is a lack of memory.", EndKind.KILLED),
        (signal.SIGKILL, True, "SIGKILL. A common cause is a lack of memory.", EndKind.KILLED),
        (35, True, "signal 35.", EndKind.SIGNAL),
    ],
)
def test_killed_data_worker_is_named(number, reset, reason, kind):
    with no_death_handler():  # it may notice the killed worker first
        record = record_of(DataLoader(Tensors(), num_workers=2), kill=number, reset=reset)
    assert record["error"] == "DataWorkerKilled"
    assert f"was killed by {reason}" in record["message"]
    assert kind_of(record) is kind
    assert not reset or "ConnectionResetError" in record["traceback"]


def test_report_of_torch_names_the_signal():
    words = "DataLoader worker (pid 7) is killed by signal: Segmentation fault. It is possible that"
    record = failure_record(RuntimeError(words), {})
    assert record["message"] == "Data worker (pid 7) was killed by SIGSEGV."
    assert kind_of(record) is EndKind.SIGNAL


def test_message_of_a_spawned_process_is_the_last_line_of_its_traceback():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    text += '  File "train.py", line 3\nValueError: x\n'
    error = ProcessRaisedException(text, error_index=1, error_pid=7)
    assert failure_record(error, {})["message"] == "process 1: ValueError: x"


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


@pytest.mark.slow
def test_error_of_the_data_set_is_kept():
    record = record_of(DataLoader(Tensors(ConnectionResetError("reset by peer")), num_workers=1))
    assert record["error"] == "ConnectionResetError"
    # The data set lost the connection to a server, not to another rank.
    assert kind_of(record) is EndKind.PYTHON
