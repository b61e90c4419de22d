"""Losses that a module keeps in an attribute for the loop to add, and what a module does at its first call only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence


class Experts(nn.Module):
    """Keeps the loss by which its experts are to be used alike; ``term`` makes it of their shares, [batch, 4]."""

    def __init__(self, term=lambda shares: shares.mean(0).square().sum()) -> None:
        super().__init__()
        self.gate, self.out, self.term = nn.Linear(5, 4), nn.Linear(5, 2), term

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.term(self.gate(x).softmax(1))
        return self.out(x)


def private(model: nn.Module, x: Tensor, **options):
    return erlangen.PrivacyEngine(seed=0).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), noise_multiplier=1e-9, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)), batch_size=len(x)), **options,
    )  # fmt: skip


def test_a_loss_that_mixes_records_is_refused_where_it_is_kept():
    with pytest.raises(MixesSamples, match=r"keeps in an attribute\) a loss of the whole batch"):
        check_independence(nn.Sequential(nn.Linear(5, 5), Experts()), (torch.randn(3, 5),))


@pytest.mark.parametrize(
    "term",
    [
        lambda shares: (shares * shares.log()).sum(1).mean(), lambda shares: shares.mean(0).square().sum().detach(),
        lambda shares: shares.mean(1), lambda shares: len(shares),
    ],
    ids=["a mean over records", "shown", "one for each", "no tensor"],
)  # fmt: skip
def test_what_else_is_kept_is_accepted(term):
    model = Experts(term)
    model(torch.randn(7, 5))  # of a batch before, whose graph is gone
    if isinstance(model.balance, Tensor) and model.balance.requires_grad:
        model.balance.sum().backward()
    model.stale = model.balance
    check_independence(model, (torch.randn(3, 5),))


def test_what_one_record_moves():
    """By 3 bounds, of which one is accounted."""

    def released(count: int) -> Tensor:
        torch.manual_seed(1)
        model, x = Experts(), torch.randn(13, 5)
        x[12] *= 10
        _, optimizer, loader = private(model, x[:count], check=False)
        for inputs, labels in loader:
            (F.cross_entropy(model(inputs), labels) + 400 * model.balance).backward()
            optimizer.step()
        return count * torch.cat([p.grad.flatten() for p in model.parameters()])

    assert float((released(13) - released(12)).norm()) > 2


class ByFirstBatch(nn.Module):
    """Takes its scale from the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(5)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready and len(x) > 1:
            self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            self.ready = True
        return x * self.scale


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": "auto"}])
def test_a_scale_of_the_first_batch_is_refused_and_not_taken_from_the_probe(options):
    """It was: the first made-up batch settled the scale before anybody looked, and training went on with that."""
    model = nn.Sequential(ByFirstBatch(), nn.Linear(5, 2))
    with pytest.raises(MixesSamples, match="ByFirstBatch at '0' mixes samples"):
        private(model, torch.randn(20, 5), **options)
    assert torch.equal(model[0].scale.detach(), torch.ones(5))
