"""Records that are alike compete for something: made-up rows that all differ would seldom show it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence


class Experts(nn.Module):
    """Each record goes to one expert (Switch layers, Fedus et al. 2021), who takes ⌈factor·B/E⌉ of a batch; None: all who come."""

    def __init__(self, experts: int = 16, factor: float | None = 1.0) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, experts), nn.ModuleList(nn.Linear(6, 2) for _ in range(experts))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, len(self.experts))
        place = (chosen.cumsum(0) * chosen).sum(1)
        room = len(x) if self.factor is None else math.ceil(self.factor * len(x) / len(self.experts))
        out = torch.stack([each(x) for each in self.experts], 1)
        return (out * chosen[..., None]).sum(1) * (gate * (place <= room))[:, None]


class First(nn.Module):
    """Whoever says the same as somebody before is left out."""

    def forward(self, x: Tensor) -> Tensor:
        same = (x[:, None] == x[None]).all(-1).tril(-1).any(1)
        return x * ~same[:, None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("experts", "factor"), [(4, 1.25), (8, 2.0), (8, 4.0), (16, 1.0)])
def test_experts_with_room_for_some_are_refused(seed, experts, factor):
    """Whether three made-up records meet at one expert was left to chance: up to 13 of 20 networks were accepted."""
    torch.manual_seed(seed)
    with pytest.raises(MixesSamples):
        check_independence(Experts(experts, factor), (torch.randn(3, 6),))


def test_copies_that_are_left_out_are_refused():
    with pytest.raises(MixesSamples, match="First at '0' mixes samples"):
        check_independence(nn.Sequential(First(), nn.Linear(4, 2)), (torch.randn(3, 4),))


@pytest.mark.parametrize("seed", range(4))
def test_experts_who_take_all_that_come_are_accepted(seed):
    torch.manual_seed(seed)
    check_independence(Experts(8, None), (torch.randn(3, 6),))


def test_what_a_record_moves_among_experts():
    """One more than 32 records, and each of 16 experts has room for one more: others than the new one are trained on."""

    def released(first: int) -> Tensor:
        torch.manual_seed(1)
        x, y, model = 5 * torch.randn(33, 6)[first:], torch.randint(0, 2, (33,))[first:], Experts()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        _, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=0.0, max_grad_norm=1.0, check=False,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        )  # fmt: skip
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return (nn.utils.parameters_to_vector(model.parameters()).detach() - before) * len(x)

    assert float((released(0) - released(1)).norm()) > 2
