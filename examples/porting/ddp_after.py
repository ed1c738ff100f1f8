"""Fit a sine with plain DDP: the script after it is ported."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import hpctrain

with hpctrain.session(seed=1) as s:
    x = torch.linspace(-3, 3, 1024).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = s.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))

    for inputs, targets in s.batches(data, global_batch_size=64, max_epochs=20):
        loss = F.mse_loss(model(inputs), targets)
        s.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        s.log(loss=loss)
