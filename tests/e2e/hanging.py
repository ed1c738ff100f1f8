"""A short training in which a rank of the first attempt does not come to the fifth step."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import hpctrain

#: Native code that holds Python's lock: nothing of this process can answer.
FROZEN = "(a+)+b"


class Hangs(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 4 and os.environ["RANK"] == "1" and os.environ["HPCTRAIN_ATTEMPT"] == "0":
            never_return(sys.argv[1])
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def never_return(how: str) -> None:
    if how == "loop":
        while True:
            pass
    if how == "frozen":
        import re

        re.match(FROZEN, "a" * 60)
    time.sleep(600)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(1)))
    hpctrain.Trainer(max_steps=8, global_batch_size=8, seed=1).fit(Hangs(), data)
