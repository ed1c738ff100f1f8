"""Train small models in float64: `train_regression.py KIND LAST_STEP [SETTING=VALUE…]`, on any ranks."""

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import hpctrain


def samples(count: int = 23) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin(), torch.arange(count) % 5


def initialized(net: nn.Module) -> nn.Module:
    for i, parameter in enumerate(net.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    return net.double()


class Regression(hpctrain.Module):
    """A linear model; with `noisy`, also a batch norm and a dropout."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(5, dtype=torch.float64), nn.Dropout(0.3)] if noisy else []
        self.body = initialized(nn.Sequential(nn.Linear(3, 5), *middle, nn.Tanh()))
        self.head = initialized(nn.Linear(5, 1))

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return (self(x) - y).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return {"val_loss": self.training_step(batch, batch_idx)}

    def test_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Noisy(Regression):
    def __init__(self) -> None:
        super().__init__(noisy=True)


class Long(Noisy):
    """Draws a random number in each validated batch, and keeps the largest one in a buffer."""

    stop_at: str = ""
    """Rank and validated batch at which it gets SIGTERM."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.validated = 0

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        if self.stop_at == f"{os.environ.get('RANK', '0')}:{self.validated}":
            os.kill(os.getpid(), signal.SIGTERM)
        drawn = torch.rand((), dtype=torch.float64)
        self.largest.fill_(max(self.largest, drawn))
        return {"val_loss": self.training_step(batch, batch_idx), "drawn": drawn}


class Tokens(Regression):
    """Sample i has i modulo 5 tokens, and its loss is a mean over tokens; every fifth sample has none."""

    def training_step(self, batch, batch_idx):
        x, y, lengths = batch
        each = (self(x) - y).pow(2).squeeze(1)
        num_tokens = lengths.sum()
        return {"loss": (each * lengths).sum() / num_tokens.clamp(min=1), "num_tokens": num_tokens}


class Gan(hpctrain.Module):
    """A critic and a generator with alternating optimizers; the critic skips every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = initialized(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        self.generator = initialized(nn.Linear(3, 3))

    def training_step(self, batch, batch_idx, optimizer_idx):
        x, _, _ = batch
        faked = self.generator(x.flip(1))
        trains = [p.requires_grad for p in (*self.critic.parameters(), *self.generator.parameters())]
        assert trains == [optimizer_idx == 0] * 4 + [optimizer_idx == 1] * 2
        if optimizer_idx == 1:
            return {"loss": -self.critic(faked).mean()}
        if batch_idx % 3 == 2:
            return None
        real = self.critic(x)
        return {"loss": (self.critic(faked.detach()) - real).mean() + real.pow(2).mean()}

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
            torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.5),
        ]


class Named(Regression):
    """Returns metrics under names that differ between ranks, as configured."""

    names = "order"

    def training_step(self, batch, batch_idx):
        metrics = {"loss": super().training_step(batch, batch_idx), "a": 10.0, "b": 20.0}
        if self.names == "time":
            metrics["time"] = 1.0
        elif dist.get_rank() == 1:
            if self.names == "order":
                return dict(reversed(metrics.items()))
            metrics["c"] = metrics.pop("b")
        return metrics


KINDS = {kind.__name__.lower(): kind for kind in (Regression, Noisy, Long, Tokens, Gan, Named)}


class EndOnOneRank(hpctrain.Callback):
    def __init__(self, last_step: int) -> None:
        self.last_step = last_step

    def on_step_end(self, trainer, module, metrics):
        if trainer.step == self.last_step and trainer.ranks.rank == trainer.ranks.world_size - 1:
            trainer.end("enough")


if __name__ == "__main__":
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    settings = {name: json.loads(value) for name, value in options.items()}
    Named.names, Long.stop_at = settings.pop("names", "order"), settings.pop("stop_at", "")
    patience, ends_at = settings.pop("patience", None), settings.pop("ends_at", None)
    callbacks: list[hpctrain.Callback] = []
    if patience:
        callbacks.append(hpctrain.EarlyStopping(patience=patience, min_delta=0.001))
    if ends_at:
        callbacks.append(EndOnOneRank(ends_at))
    trainer = hpctrain.Trainer(
        max_steps=int(sys.argv[2]), seed=3, callbacks=callbacks, **{"global_batch_size": 10, **settings}
    )
    module = KINDS[sys.argv[1]]()
    data, val_data = samples(), samples(400 if isinstance(module, Long) else 23)
    try:
        trainer.fit(module, data, val_data if patience or "validate_every" in settings else None)
    finally:
        if trainer.is_main and isinstance(module, Long):
            print("validated", module.validated)
    state = torch.cat([value.double().flatten() for value in module.state_dict().values()]).tolist()
    everyone = [state] * trainer.ranks.world_size
    if dist.is_initialized():
        dist.all_gather_object(everyone, state)
    result = {"state": everyone, "step": trainer.step, "metrics": trainer.metrics, "ending": trainer.ending}
    if sys.argv[1] == "regression":
        result["test"] = trainer.test(module, data)
        result["predictions"] = torch.cat(trainer.predict(module, data)).flatten().tolist()
    if trainer.is_main:
        print(json.dumps(result))
