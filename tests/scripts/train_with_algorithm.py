"""Train digits: `train_with_algorithm.py ALGORITHM LAST_STEP [SETTING=VALUE…]`."""

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hpctrain
from hpctrain.training.algorithms import find_algorithm
from hpctrain.training.algorithms.compression import PowerSGD, QAdam
from hpctrain.training.algorithms.weight_averaging import LocalSGD

NUM_WEIGHTS = 64 * 128 + 128 + 128 * 10 + 10


class Digits(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"accuracy": (self.net(x).argmax(1) == y).double().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the handwritten digits of scikit-learn, whose import takes seconds."""
    sklearn = find_spec("sklearn")
    assert sklearn is not None
    assert sklearn.origin is not None
    digits = numpy.loadtxt(Path(sklearn.origin).with_name("datasets") / "data/digits.csv.gz", delimiter=",")
    return torch.tensor(digits[:, :64], dtype=torch.float32) / 16, torch.tensor(digits[:, 64]).long()


CONFIGURED = {
    "local_sgd": LocalSGD,
    "local_sgd, every 8": partial(LocalSGD, 8),
    "powersgd": PowerSGD,
    "qadam": partial(QAdam, 40),
}

if __name__ == "__main__":
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    settings = {"checkpoint_every": None, **{name: json.loads(value) for name, value in options.items()}}
    name = sys.argv[1]
    algorithm = CONFIGURED[name]() if name in CONFIGURED else find_algorithm(name)
    settings |= {"max_steps": int(sys.argv[2]), "algorithm": algorithm}
    trainer = hpctrain.Trainer(global_batch_size=64, seed=1, validate_every=10**6, **settings)
    (x, y), module = samples(), Digits()
    trainer.fit(module, (x[:1400], y[:1400]), (x[1400:], y[1400:]))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    everyone = [weights.tolist()] * trainer.ranks.world_size
    if dist.is_initialized():
        dist.all_gather_object(everyone, weights.tolist())
    if trainer.is_main:
        same = all(weights == everyone[0] for weights in everyone)
        result = {**trainer.metrics, "same": same, "weights": everyone[0]}
        print(json.dumps({**result, "sent_bytes": algorithm.sent_bytes}))
