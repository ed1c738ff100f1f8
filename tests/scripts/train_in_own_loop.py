"""Train with a session: `train_in_own_loop.py LAST_STEP [RANK:STEP at which it gets SIGTERM]`, in float64."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from train_in_float64 import Exact, samples

import hpctrain

if __name__ == "__main__":
    stop_at = tuple(map(int, sys.argv[2].split(":"))) if len(sys.argv) > 2 else None
    seen = []
    with hpctrain.session(seed=3, checkpoint_every=4, record_samples=True) as s:
        module = Exact()
        optimizer, scheduler = module.configure_optimizers()
        model, optimizer, scheduler = s.prepare(module.net, optimizer, scheduler)
        for x, y in s.batches(samples(), global_batch_size=5, max_steps=int(sys.argv[1])):
            loss = (model(x) - y).pow(2).mean()
            s.backward(loss)
            s.log(loss=loss, lr=scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append(len(x))
            if stop_at == (s.ranks.rank, s.step + 1):
                os.kill(os.getpid(), signal.SIGTERM)
        assert s.step == int(sys.argv[1])
    parameters = torch.cat([p.detach().flatten() for p in module.net.parameters()]).tolist()
    everyone = [parameters] * s.ranks.world_size
    if dist.is_initialized():
        dist.all_gather_object(everyone, parameters)
    if s.is_main:
        print(json.dumps({"parameters": everyone, "steps": len(seen)}))
