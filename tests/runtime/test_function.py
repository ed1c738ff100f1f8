"""What a rank makes of the end of a function. Whole jobs are in tests/e2e/test_executor.py."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.commands import environment

from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.runtime import function_worker
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StoppedBeforeTraining
from hpctrain.serialization import CallPayload, FunctionCall

PARCEL = CallPayload(b"", ("/of the program",))


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


def team(world_size: int = 1) -> DistributedContext:
    ranks = dataclasses.replace(detect({}), world_size=world_size, local_world_size=world_size)
    return DistributedContext(ranks, torch.device("cpu"), None)


class Following:
    """What submitit's DelayedSubmission looks like."""

    def __init__(self, called, *args, **kwargs):
        self.function, self.args, self.kwargs = called, args, kwargs


class Checkpointable:
    def __init__(self, leave=None, following=True):
        self.leave, self.following, self.step = leave, following, 0

    def __call__(self, lr):
        self.step += 1
        if self.leave is not None:
            raise self.leave
        return lr

    def checkpoint(self, lr):
        return Following(self, lr / 2) if self.following else None


@pytest.mark.parametrize(
    ("code", "world_size"), [(SystemExit, 1), (SystemExit, 2), (StoppedBeforeTraining, 1)]
)
def test_what_checkpoint_returns_is_called_next_time(run, code, world_size):
    with pytest.raises(code):
        function_worker._result_of(
            FunctionCall(Checkpointable(code(75)), (8.0,)), PARCEL, run, team(world_size)
        )
    following = CallPayload.read(run.resume_call)
    assert following.sys_path == ("/of the program",)
    call = following.deserialize()
    assert (call.function.step, call.args) == (1, (4.0,))


def test_several_ranks_that_left_anywhere_are_not_asked(run, capsys):
    with pytest.raises(StoppedBeforeTraining):
        function_worker._result_of(
            FunctionCall(Checkpointable(StoppedBeforeTraining(75)), (8.0,)), PARCEL, run, team(2)
        )
    assert not run.resume_call.exists()
    assert "hpctrain.should_stop()" in capsys.readouterr().out


def test_checkpoint_may_end_the_run(run, capsys):
    with pytest.raises(SystemExit):
        function_worker._result_of(
            FunctionCall(Checkpointable(SystemExit(75), following=False), (8.0,)), PARCEL, run, team()
        )
    assert run.cancel_request.exists()
    assert "checkpoint() returned None" in capsys.readouterr().out


def test_a_function_without_checkpoint_leaves_nothing(run):
    def leave():
        raise SystemExit(75)

    with pytest.raises(SystemExit):
        function_worker._result_of(FunctionCall(leave), PARCEL, run, team())
    assert not run.resume_call.exists()


def test_submitits_own_name_for_checkpoint_goes_first():
    call = functools.partial(print)
    call.__submitit_checkpoint__ = "this"
    call.checkpoint = "that"
    assert function_worker._checkpoint_of(FunctionCall(call)) == "this"


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ValueError("x"), True),
        (UserError("x"), True),
        (ModuleNotFoundError("x"), True),
        (dist.DistNetworkError("x"), False),
        (torch.AcceleratorError("x", 1), False),
    ],
)
def test_which_errors_another_start_cannot_mend(run, error, final):
    assert function_worker._is_final(error, PARCEL, run) is final


def test_with_something_to_go_on_from_another_start_gets_further(run):
    assert function_worker._is_final(ValueError(), PARCEL, run)
    assert not function_worker._is_final(ValueError(), CallPayload(b"", (), retry_on_exception=True), run)
    checkpoint = run.checkpoint(5)
    checkpoint.mkdir(parents=True)
    assert function_worker._is_final(ValueError(), PARCEL, run)
    (checkpoint / "manifest.json").write_text("{}")
    assert not function_worker._is_final(ValueError(), PARCEL, run)
    shutil.rmtree(checkpoint)
    assert function_worker._is_final(ValueError(), PARCEL, run)
    (run.checkpoints / "mine.pt").touch()
    assert not function_worker._is_final(ValueError(), PARCEL, run)
    assert function_worker._is_final(UserError("another start cannot help"), PARCEL, run)


ASKING = """
import sys, time, hpctrain
print(hpctrain.should_stop(), flush=True)
while not hpctrain.should_stop():
    time.sleep(0.02)
assert hpctrain.should_stop()
assert "torch" not in sys.modules
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_script_alone_can_ask_whether_to_stop(number):
    command = [sys.executable, "-c", ASKING]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "False\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert f"stop requested by {number.name}" in out
