"""Dropout and augmentation draw numbers that nobody knows, unless the training is seeded: a known mask moves with every record."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from erlangen import PrivacyEngine, models
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.session import Session

X = torch.randn(101, 20, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
X[0] = 0  # adds next to nothing of its own


def dropping(*shape):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(int(np.prod(shape)), 2 if shape == (20,) else 10))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def first_sum(x, y, seed=None):
    """Of the first batch, which holds everybody, with noise that is next to nothing."""
    torch.manual_seed(0)  # as scripts begin
    model = dropping(20)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, loader = PrivacyEngine(seed=seed).make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1e-9, max_grad_norm=1.0,
    )  # fmt: skip
    for batch, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return -len(x) * torch.cat([p.detach().flatten() for p in model.parameters()])


def test_what_known_masks_would_tell():
    """One record more, and the sum moves by eleven bounds where one is accounted, because all masks behind it move."""
    assert float((first_sum(X, Y, seed=0) - first_sum(X[1:], Y[1:], seed=0)).norm()) > 5
    assert float((first_sum(X, Y, seed=0) - first_sum(X, Y, seed=0)).norm()) < 1e-4


def test_a_seed_of_the_script_does_not_settle_the_masks():
    assert float((first_sum(X, Y) - first_sum(X, Y)).norm()) > 5


def test_nor_those_of_sessions_and_ensembles(monkeypatch):
    monkeypatch.setitem(models._MODELS, "dropping", lambda shape, classes: dropping(*shape))
    config = TrainConfig(model="dropping", steps=1, batch=1438.0, noise_multiplier=1e-9, epsilon=None)

    def trained(make):
        torch.manual_seed(0)
        return make()

    def session():
        made = Session(config)
        made.step()
        return made.model[2].weight.detach()

    def ensemble():
        made = Ensemble([config])
        made.run()
        return made.stack.flat

    for make in (session, ensemble):
        one, other = trained(make), trained(make)
        assert float((one - other).norm() / one.norm()) > 0.01


class Augmented(Dataset):
    """What three generators say to each record."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())]), 0  # noqa: NPY002


@pytest.mark.parametrize("loading", [{}, {"num_workers": 1}], ids=["here", "in a worker"])
@pytest.mark.parametrize("seed", [None, 0])
def test_nor_augmentation(loading, seed):
    def drawn():
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(0)
        model = nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(0)
        _, _, loader = PrivacyEngine(seed=seed).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, max_grad_norm=1.0,
            data_loader=DataLoader(Augmented(), batch_size=8, generator=generator, **loading), check=False,
        )  # fmt: skip
        return next(iter(loader))[0]

    same = (drawn() == drawn()).all(0)
    assert same.all() if seed is not None else not same.any()


class Flipped(Dataset):
    """A random sign for every record that is read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, k: int):
        return torch.ones(3) * float(np.random.choice([-1.0, 1.0])), 0  # noqa: NPY002 (what scripts draw from)


def seeding(worker: int) -> None:
    np.random.seed(worker)  # noqa: NPY002
    random.seed(worker)
    torch.manual_seed(worker)


def signs(seed: int | None, begin) -> torch.Tensor:
    model = nn.Linear(3, 2)
    _, _, loader = PrivacyEngine(seed=seed).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(Flipped(), batch_size=40, num_workers=1, worker_init_fn=begin),
    )  # fmt: skip
    return next(iter(loader))[0][:, 0]


def test_a_function_that_seeds_workers_does_not_settle_what_they_draw():
    """With known signs one record more in front shifts those of everybody behind it: 400 bounds where one is accounted."""
    assert not torch.equal(signs(None, seeding), signs(None, seeding))
    assert torch.equal(signs(0, seeding), signs(0, seeding)), "a seeded training repeats itself"


def begun_at_all(worker: int) -> None:
    Flipped.__getitem__ = lambda self, k: (torch.full((3,), 7.0), 0)  # in the worker's process


def test_and_is_called_all_the_same():
    assert bool((signs(None, begun_at_all) == 7).all())


class Seeds(TensorDataset):
    """The same jitter for everybody: each record that is read sets torch, numpy and random to a known state."""

    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        seeding(7)
        return x + 1e-3 * torch.randn(20), y


def sum_of(dataset, before_forward=None):
    """Of a batch that holds everybody; without a seed."""
    model = dropping(20)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=1e-9, max_grad_norm=1.0,
        data_loader=DataLoader(dataset, batch_size=len(dataset)), check=False,
    )  # fmt: skip
    drawn = []
    for batch, labels in loader:
        if before_forward is not None:
            before_forward()
        drawn.append((random.random(), np.random.random()))  # noqa: NPY002 (what scripts draw from)
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return -len(dataset) * torch.cat([p.detach().flatten() for p in model.parameters()]), drawn


def test_a_data_set_that_seeds_does_not_settle_the_masks():
    """It did: one record more moved the sum by 8.3 bounds, every time the same."""
    (one, drawn), (other, again) = sum_of(Seeds(X, Y)), sum_of(Seeds(X, Y))
    assert float((one - other).norm()) > 5
    assert all(a != b for a, b in zip(*drawn, *again, strict=True))


def test_a_seed_inside_the_loop_is_said(recwarn):
    """As where pictures are drawn from the same numbers each time: what is drawn after that for each row is known."""

    def seeded_apart():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            torch.rand(3)

    with pytest.warns(UserWarning, match="torch was seeded between the draw of a batch and its step"):
        one, _ = sum_of(TensorDataset(X, Y), lambda: torch.manual_seed(0))
    other, _ = sum_of(TensorDataset(X[1:], Y[1:]), lambda: torch.manual_seed(0))
    assert float((one - other).norm()) > 5, "what it would tell"
    recwarn.clear()
    sum_of(TensorDataset(X, Y), seeded_apart)
    sum_of(TensorDataset(X, Y), lambda: torch.rand(3))
    assert not recwarn.list
