"""A small network, its records and an ordinary training loop, made private by `PrivacyEngine`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen

N, B = 60, 12


def data(n: int = N, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 4, 4, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def private(model=None, optimizer=None, dataset=None, batch=B, engine=None, **options):
    engine = engine or erlangen.PrivacyEngine(seed=0)
    model = net() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    loader = DataLoader(data() if dataset is None else dataset, batch_size=batch)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def loop(model, optimizer, loader, epochs=1, loss=nn.functional.cross_entropy):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
