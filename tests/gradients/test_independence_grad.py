"""Modules are looked at as training calls them: what they do only where gradients are asked for is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence


class Centres(nn.Module):
    """Takes the mean of the batch off while it learns; no gradient goes through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.detach().mean(0) if torch.is_grad_enabled() and len(x) else x


class Remembers(nn.Module):
    """Keeps a running mean while it learns, and takes that of the batches before off."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and len(x)):
            return x
        known, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - known


class Recomputes(nn.Module):
    """Two ways through the same layer, as large networks have them; both give the same."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            return checkpoint(self.inner, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)
        return self.inner(x)


@pytest.mark.parametrize("kind", [Centres, Remembers])
def test_what_is_done_only_while_it_learns_is_refused(kind):
    with pytest.raises(MixesSamples, match=f"{kind.__name__} at '0' mixes samples"):
        check_independence(nn.Sequential(kind(), nn.Linear(5, 2)), (torch.randn(3, 5),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_on_the_way_back_are_accepted(reentrant):
    check_independence(nn.Sequential(Recomputes(reentrant), nn.Linear(5, 2)), (torch.randn(3, 5),))


@pytest.mark.parametrize(("kind", "least"), [(Centres, 9.0), (Remembers, 5.0)])
def test_what_one_record_moves(kind, least):
    """Nobody looked: one record in eleven moved the sum of all by so many bounds."""

    def released(count: int) -> Tensor:
        torch.manual_seed(0)
        model, x = nn.Sequential(kind(), nn.Linear(5, 2)), torch.randn(11, 5)
        x[10] = 1e4
        for p in model.parameters():
            nn.init.zeros_(p)
        _, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), noise_multiplier=1e-9, max_grad_norm=1.0, check=False,
            data_loader=DataLoader(TensorDataset(x[:count], torch.zeros(count, dtype=torch.long)), batch_size=count),
        )  # fmt: skip
        for _ in range(2):
            for inputs, labels in loader:
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        return count * torch.cat([p.grad.flatten() for p in model.parameters()])

    assert float((released(11) - released(10)).norm()) > least
