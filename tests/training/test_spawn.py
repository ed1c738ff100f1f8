"""`ddp_spawn`, `dp` and `devices=…`: one process that trains on several devices."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers import SCRIPTS
from helpers.commands import environment, run_command
from helpers.fork_server import run_forked
from helpers.waiting import wait_for
from train_with_strategies import train_manually

pytestmark = pytest.mark.ranks

SCRIPT = SCRIPTS / "train_with_strategies.py"

VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}

UNGUARDED = """
import torch, hpctrain
from train_with_strategies import Blocks, samples
from hpctrain.training.strategies.sharded import ZeRO3
print("imported")

@hpctrain.register_strategy("own")
class OwnStrategy(ZeRO3):
    def before_update(self):
        super().before_update()
        if self.context.ranks.is_main:
            print("own strategy")

class Losses(hpctrain.Callback):
    def __init__(self):
        self.seen = []
    def on_step_end(self, trainer, module, metrics):
        self.seen.append(metrics["loss"])
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class Own(Blocks):  # is defined here, and so travels whole
    def get_extra_state(self):
        return Losses
    def set_extra_state(self, state):
        self.extra = state
    def training_step_end(self, outputs):
        return {key: value.mean() for key, value in outputs.items()}

trainer = hpctrain.Trainer(max_steps=5, global_batch_size=10, seed=3, strategy="own", devices=2,
                           callbacks=[losses := Losses()])
module = Own()
trainer.fit(module, samples(), samples())
assert module.extra.__name__ == "Losses"
weights = {name: value for name, value in module.state_dict().items() if name != "_extra_state"}
torch.save((weights, trainer.step, trainer.metrics, losses.seen), "out")
"""


@pytest.mark.extended
@pytest.mark.fully_sharded
def test_module_of_the_caller_has_the_weights(tmp_path):
    """Any strategy works, also the script's own, without a main guard; no process runs the script again.

    Values other than tensors also come back, and so does the state of callbacks.
    """
    (tmp_path / "script.py").write_text(UNGUARDED)
    printed = run_command([sys.executable, "script.py"], VARIABLES, cwd=tmp_path, timeout=110).stdout
    assert printed.count("imported") == 1
    assert printed.count("own strategy") >= 5
    weights, step, metrics, losses = torch.load(tmp_path / "out")
    assert step == len(losses) == 5
    assert metrics["val_loss"] > 0
    for name, value in train_manually(5).items():
        assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12), name


#: As in a notebook, the main module has no file.
NOTEBOOK = """
import os, hpctrain
from train_with_strategies import Blocks, samples

class Own(Blocks):
    pass

module = Own()
before = [value.clone() for value in module.parameters()]
hpctrain.Trainer(max_steps=2, global_batch_size=10, strategy="ddp_spawn", devices=2).fit(module, samples())
assert not all(map(lambda a, b: a.equal(b), before, module.parameters()))

def rank() -> str:
    return os.environ["RANK"]

executor = hpctrain.Executor("runs", cluster="local", code_snapshot=False, ntasks_per_node=2)
print("ranks", executor.submit(rank).results())
"""


@pytest.mark.extended
def test_notebook_trains_and_submits_functions(tmp_path):
    (tmp_path / "cells").write_text(NOTEBOOK)
    command = ["sh", "-c", f"{sys.executable} - < cells"]
    printed = run_command(command, VARIABLES, cwd=tmp_path, timeout=110).stdout
    assert "ranks ['0', '1']" in printed


@pytest.mark.extended
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_module_is_trained_in_new_processes(tmp_path):
    training = {"strategy": "ddp_spawn", "devices": 2, "max_steps": 12, "lightning": True}
    run_command([sys.executable, SCRIPT, tmp_path / "out", json.dumps([training])], VARIABLES, timeout=110)
    (result,) = torch.load(tmp_path / "out")
    assert result["step"] == 12
    for name, value in train_manually(12).items():
        assert torch.allclose(result["weights"][name], value, rtol=1e-9, atol=1e-12), name


FAILING = """
import sys, threading, time, hpctrain
from hpctrain.training.algorithms import register_algorithm
from hpctrain.training.algorithms.algorithm import AllReduce
from train_with_strategies import Blocks, samples

@register_algorithm("own")  # is known in the ranks, which do not run this line
class Own(AllReduce):
    pass

class Failing(Blocks):
    def training_step(self, batch, batch_idx):
        import os
        if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
            raise ArithmeticError("by rank 1")
        if sys.argv[1] == "slow":
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)

module = Failing()
if sys.argv[1] == "pickle":
    module.net[0].lock = {"it": threading.Lock()}
hpctrain.Trainer(max_steps=500, strategy="ddp_spawn", devices=2, algorithm="own").fit(module, samples())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("pickle", "module._modules['net']._modules['0'].lock['it'] has type _thread.lock, which"),
        ("fail", "ArithmeticError: by rank 1"),
    ],
)
def test_errors_are_reported_to_the_caller(tmp_path, mode, message):
    (tmp_path / "script.py").write_text(FAILING)
    result = run_command(
        [sys.executable, "script.py", mode], VARIABLES, cwd=tmp_path, check=False, timeout=110
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert mode != "fail" or "Rank 1 of 2 failed:" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True])
def test_ctrl_c_or_the_death_of_the_caller_ends_all_ranks(tmp_path, is_killed):
    (tmp_path / "script.py").write_text(FAILING)
    command = [sys.executable, "script.py", "slow"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        env=environment(VARIABLES),
        cwd=tmp_path,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as caller:
        assert caller.stdout is not None
        wait_for(lambda: "step" in caller.stdout.readline(), 60, "a step")
        if is_killed:
            caller.kill()
        else:
            os.killpg(caller.pid, signal.SIGINT)  # like a terminal: to the ranks, too
        _, stderr = caller.communicate(timeout=120)
    assert is_killed or (caller.returncode, stderr.count("Traceback")) == (-signal.SIGINT, 1)
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: os.killpg(caller.pid, 0), 30, "the end of the ranks")


@pytest.mark.long
def test_stop_is_forwarded_and_the_run_resumes(tmp_path):
    """The caller exits with 75 after its ranks have saved; no process is left."""
    training = {"strategy": "ddp_spawn", "devices": 2, "run_dir": str(tmp_path / "run"), "sleep": 0.02}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    with subprocess.Popen(
        [*command, json.dumps([{**training, "max_steps": 5000}])], env=environment(VARIABLES)
    ) as first:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 60, "three steps")
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(120) == 75
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    run_command([*command, json.dumps([{**training, "max_steps": step + 3, "sleep": 0}])], VARIABLES)
    (result,) = torch.load(tmp_path / "out")
    assert result["step"] == step + 3
    for name, value in train_manually(step + 3).items():
        assert torch.allclose(result["weights"][name], value, rtol=1e-9, atol=1e-12), name


def test_dp_is_refused_with_several_ranks(tmp_path):
    run_forked(
        SCRIPT,
        [str(tmp_path / "out"), '[{"strategy": "dp"}]'],
        {**VARIABLES, "GLOO_SOCKET_IFNAME": "lo"},
        ranks=2,
    )
    (result,) = torch.load(tmp_path / "out")
    assert "Strategy 'dp' runs in one process, but there are 2 ranks (torchrun)" in result["error"]
