"""`ddp_spawn`, `dp` and `devices=…`: what a process does that trains on several devices by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import environment, run_command, wait_for

SCRIPT = Path(__file__).with_name("strategic.py")
sys.path.insert(0, str(SCRIPT.parent))

from strategic import by_hand  # noqa: E402 (a script, not a package)

VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}

UNGUARDED = """
import torch, hpctrain
from strategic import Blocks, samples
print("imported")

class Own(Blocks):  # is defined here, and so travels whole
    def training_step_end(self, outputs):
        return {key: value.mean() for key, value in outputs.items()}

trainer = hpctrain.Trainer(max_steps=5, global_batch_size=10, seed=3, strategy="zero3", devices=2)
module = Own()
trainer.fit(module, samples(), samples())
torch.save((module.state_dict(), trainer.step, trainer.metrics), "out")
"""


def test_the_callers_module_has_the_weights(tmp_path):
    """With any strategy, and with no guard around the script, which no process begins anew."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    printed = run_command([sys.executable, "script.py"], VARIABLES, cwd=tmp_path, timeout=110).stdout
    assert printed.count("imported") == 1
    weights, step, metrics = torch.load(tmp_path / "out")
    assert step == 5
    assert metrics["val_loss"] > 0
    for name, value in by_hand(5).items():
        assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": "ddp_spawn", "devices": 2}, marks=pytest.mark.long),
        {"strategy": "dp", "devices": 3},
    ],
)
def test_fifty_steps_are_those_of_one_process(tmp_path, settings):
    training = {**settings, "max_steps": 50}
    run_command([sys.executable, SCRIPT, tmp_path / "out", json.dumps([training])], VARIABLES, timeout=110)
    (result,) = torch.load(tmp_path / "out")
    for name, value in by_hand(50).items():
        assert torch.allclose(result["weights"][name], value, rtol=1e-9, atol=1e-12), name


FAILING = """
import sys, threading, hpctrain
from strategic import Blocks, samples

class Failing(Blocks):
    def training_step(self, batch, batch_idx):
        import os
        if os.environ["RANK"] == "1":
            raise ArithmeticError("by rank 1")
        return super().training_step(batch, batch_idx)

module = Failing() if sys.argv[1] == "fail" else Blocks()
if sys.argv[1] == "pickle":
    module.net[0].lock = {"it": threading.Lock()}
hpctrain.Trainer(max_steps=5, strategy="ddp_spawn", devices=2).fit(module, samples())
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "pickle",
            r"Trainer.fit(): module._modules['net']._modules['0'].lock['it'] is a _thread.lock, which",
        ),
        ("fail", "ArithmeticError: by rank 1"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, how, message):
    (tmp_path / "script.py").write_text(FAILING)
    done = run_command([sys.executable, "script.py", how], VARIABLES, cwd=tmp_path, check=False, timeout=110)
    assert done.returncode == 1
    assert message in done.stderr
    assert how == "pickle" or "Rank 1 of 2 has failed:" in done.stderr


@pytest.mark.long
def test_a_stop_is_passed_on_and_the_run_goes_on(tmp_path):
    """The caller leaves with code 75 when its ranks have saved; nothing is left behind."""
    training = {"strategy": "ddp_spawn", "devices": 2, "run_dir": str(tmp_path / "run"), "sleep": 0.02}
    words = [sys.executable, str(SCRIPT), str(tmp_path / "out")]
    with subprocess.Popen(
        [*words, json.dumps([{**training, "max_steps": 5000}])], env=environment(VARIABLES)
    ) as first:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 60, "three steps")
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(60) == 75
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    run_command([*words, json.dumps([{**training, "max_steps": step + 3, "sleep": 0}])], VARIABLES)
    (result,) = torch.load(tmp_path / "out")
    assert result["step"] == step + 3
    for name, value in by_hand(step + 3).items():
        assert torch.allclose(result["weights"][name], value, rtol=1e-9, atol=1e-12), name


WHOLE_BATCH = """
import torch, hpctrain
from torch import nn

class Seen(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        rows, names = batch["rows"], batch["names"]
        parts.append(len(rows))
        assert names == "one"
        return {"out": self.net(rows), "part": torch.tensor(len(rows))}

    def training_step_end(self, outputs):
        seen.append((len(outputs["out"]), outputs["part"].tolist()))
        return outputs["out"].pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

parts, seen = [], []
collate = lambda rows: {"rows": torch.stack([row for row, in rows]), "names": "one"}
trainer = hpctrain.Trainer(max_steps=2, global_batch_size=10, strategy="dp", devices=3, collate_fn=collate)
trainer.fit(Seen(), torch.utils.data.TensorDataset(torch.randn(20, 3)))
print(parts, seen)
"""


def test_dp_splits_the_batch_and_its_end_sees_all_of_it(tmp_path):
    (tmp_path / "script.py").write_text(WHOLE_BATCH)
    printed = run_command([sys.executable, "script.py"], VARIABLES, cwd=tmp_path, timeout=110).stdout
    assert "'ddp' is faster" in printed
    assert printed.splitlines()[-1] == "[4, 3, 3, 4, 3, 3] [(10, [4, 3, 3]), (10, [4, 3, 3])]"


def test_dp_is_refused_among_several_ranks(tmp_path):
    from forked import run_forked

    run_forked(
        SCRIPT,
        [str(tmp_path / "out"), '[{"strategy": "dp"}]'],
        {**VARIABLES, "GLOO_SOCKET_IFNAME": "lo"},
        ranks=2,
    )
    (result,) = torch.load(tmp_path / "out")
    assert "strategy 'dp' is for one process, and there are 2 ranks (torchrun)" in result["error"]
