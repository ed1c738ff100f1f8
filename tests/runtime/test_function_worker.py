"""The end of a function on a rank. Whole jobs are in tests/e2e/test_executor.py."""

import dataclasses
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
from hpctrain.records.call_payload import CallPayload, FunctionCall
from hpctrain.rundir import RunDir
from hpctrain.runtime import function_worker
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StoppedBeforeTraining

PAYLOAD = CallPayload(b"", ("/of the program",))


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


def make_context(world_size: int) -> DistributedContext:
    ranks = dataclasses.replace(detect({}), world_size=world_size, local_world_size=world_size)
    return DistributedContext(ranks, torch.device("cpu"), None)


class NextCall:
    """Like submitit's DelayedSubmission."""

    def __init__(self, called, *args, **kwargs):
        self.function, self.args, self.kwargs = called, args, kwargs


class Checkpointable:
    def __init__(self, error, following=True):
        self.error, self.following, self.step = error(75), following, 0

    def __call__(self, lr):
        self.step += 1
        raise self.error

    def checkpoint(self, lr):
        return NextCall(self, lr / 2) if self.following else None


def stop(run, error, world_size=1, **options):
    """Call a function that a stop ends with this error."""
    call = FunctionCall(Checkpointable(error, **options), (8.0,))
    with pytest.raises(error):
        function_worker._result_of(call, PAYLOAD, run, make_context(world_size))


@pytest.mark.parametrize(
    ("error", "world_size"), [(SystemExit, 1), (SystemExit, 2), (StoppedBeforeTraining, 1)]
)
def test_next_call_is_the_result_of_checkpoint(run, error, world_size):
    stop(run, error, world_size)
    payload = CallPayload.read(run.resume_call)
    assert payload.sys_path == ("/of the program",)
    call = payload.deserialize()
    assert (call.function.step, call.args) == (1, (4.0,))


def test_checkpoint_of_several_ranks_is_not_called_without_consensus(run, capsys):
    stop(run, StoppedBeforeTraining, 2)
    assert not run.resume_call.exists()
    assert "hpctrain.should_stop()" in capsys.readouterr().out


def test_checkpoint_may_end_the_run(run, capsys):
    stop(run, SystemExit, following=False)
    assert run.cancel_request.exists()
    assert "checkpoint() returned None" in capsys.readouterr().out


def test_errors_are_final_without_a_checkpoint(run):
    assert function_worker._is_final(ValueError(), PAYLOAD, run)
    assert not function_worker._is_final(dist.DistNetworkError("x"), PAYLOAD, run)
    if hasattr(torch, "AcceleratorError"):  # torch 2.8
        assert not function_worker._is_final(torch.AcceleratorError("x", 1), PAYLOAD, run)
    assert not function_worker._is_final(ValueError(), CallPayload(b"", (), retry_on_exception=True), run)
    checkpoint = run.checkpoint(5)
    checkpoint.mkdir(parents=True)
    assert function_worker._is_final(ValueError(), PAYLOAD, run)
    (checkpoint / "manifest.json").write_text("{}")
    assert not function_worker._is_final(ValueError(), PAYLOAD, run)
    shutil.rmtree(checkpoint)
    assert function_worker._is_final(ValueError(), PAYLOAD, run)
    (run.checkpoints / "mine.pt").touch()
    assert not function_worker._is_final(ValueError(), PAYLOAD, run)
    assert function_worker._is_final(UserError("another start cannot help"), PAYLOAD, run)


POLL_SHOULD_STOP = """
import sys, time, hpctrain
print(hpctrain.should_stop(), flush=True)
while not hpctrain.should_stop():
    time.sleep(0.02)
assert hpctrain.should_stop()
assert "torch" not in sys.modules
sys.exit(75)
"""


def test_script_can_ask_should_stop_without_torch():
    command = [sys.executable, "-c", POLL_SHOULD_STOP]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "False\n"
        process.send_signal(signal.SIGUSR2)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "stop requested by SIGUSR2" in out
