"""Time of a restart until the end of its first step, with `torch.compile` and without.

    python benchmarks/compiled_restart.py [--rounds N]

Both variants alternate. Rank 0 kills itself after three steps, and the next attempt starts without Inductor's
graphs on its disk, as on another node, but with the C++ code for CPUs. No worker stands by.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from results import Results

from hpctrain.files import read_json_lines

SCRIPT = """
import os, shutil, signal, sys, tempfile, time
from pathlib import Path
local = Path(__file__).parent / "local"
local.mkdir(exist_ok=True)
tempfile.tempdir = str(local)
for name in ("fxgraph", "aotautograd"):
    for folder in local.glob(f"torchinductor_*/{name}"):
        shutil.rmtree(folder)
import torch
from torch import nn
import hpctrain

class Model(hpctrain.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(256, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Kill(hpctrain.Callback):
    def on_step_end(self, trainer, module, metrics):
        if trainer.step == 3:
            time.sleep(3)  # until the heartbeat has reported the start
            if os.environ["HPCTRAIN_ATTEMPT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)

settings = {"max_steps": 6, "checkpoint_every": 2, "global_batch_size": 64}
trainer = hpctrain.Trainer(**settings, compile=sys.argv[1] == "compiled", callbacks=[Kill()])
trainer.fit(Model(), torch.utils.data.TensorDataset(torch.randn(512, 256)))
"""
#: On two busy cores, Inductor builds its C++ code within a few minutes.
LIMIT_S = 600
VARIANTS = ("uncompiled", "compiled")


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=3)
    options = results.parse()
    starts: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for number in range(options.rounds):
            for variant in VARIANTS:
                run = Path(folder, f"{variant}-{number}")
                for attempt, seconds in enumerate(measure_starts(script, run, variant)):
                    starts.setdefault((variant, attempt), []).append(seconds)
    for (variant, attempt), seconds in starts.items():
        results.add(f"{'restart' if attempt else 'first start'}, {variant}", seconds, "s")
    pairs = zip(starts["compiled", 1], starts["uncompiled", 1], strict=True)
    ratios = [compiled / uncompiled for compiled, uncompiled in pairs]
    results.add("restart, compiled ÷ uncompiled", ratios, limit=1.2, headline=True)
    results.finish()


def measure_starts(script: Path, run: Path, variant: str) -> list[float]:
    """Return the seconds from the start of each of the two attempts to the end of its first step."""
    hpctrain = [sys.executable, "-m", "hpctrain"]
    submit = [*hpctrain, "submit", "--backend=local", "--standby-workers=never", f"--run-dir={run}"]
    subprocess.run([*submit, str(script), variant], check=True, stdout=subprocess.DEVNULL, timeout=60)
    wait = [*hpctrain, "wait", str(run)]
    subprocess.run(wait, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    events = read_json_lines(run / "events.jsonl")
    seconds = [event["seconds"] for event in events if event["kind"] == "startup"]
    assert len(seconds) == 2, seconds
    return seconds


if __name__ == "__main__":
    main()
