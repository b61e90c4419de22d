"""A module that draws random numbers treats each record by itself all the same, however many there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erlangen.gradients.independence import MixesSamples, check_independence


class KeptShare(nn.Module):
    """Drops whole records, and divides by what the batch keeps: DropBlock as it is usually written, in one block."""

    def __init__(self, drop: float, uniform: bool) -> None:
        super().__init__()
        self.drop, self.uniform = drop, uniform

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        drawn = x.new_empty(len(x), 1)
        return (drawn.uniform_() > self.drop).to(x) if self.uniform else drawn.bernoulli_(1 - self.drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = self.mask(x)
        return x * mask * mask.numel() / mask.sum().clamp(min=1)


class OnAverage(KeptShare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask(x) / (1 - self.drop) if self.training else x


class OneKernel(nn.Module):
    """Dropout as it is computed on a GPU."""

    def __init__(self, drop: float = 0.5) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, self.drop, True)[0] if self.training else x


class ByLength(OneKernel):
    """In training it divides by how many records there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = super().forward(x) if self.drop else F.dropout(x, 0.5, self.training)
        return dropped * (8 / max(1, len(x)) if self.training else 1)


class Noisy(nn.Module):
    """Of the size of the whole batch's noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return x + noise / noise.norm() if self.training else x


def inside(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), layer, nn.Linear(4, 2))


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("drop", [0.02, 0.5, 0.9])
def test_a_mask_over_what_the_batch_keeps_is_refused(drop, uniform, rows):
    """One record more, of 65, moved the clipped sum of a regression by 23 bounds."""
    with pytest.raises(MixesSamples, match=r"at '2' mixes samples.*for one record"):
        check_independence(inside(KeptShare(drop, uniform)), (torch.randn(rows, 4),))


@pytest.mark.parametrize("layer", [ByLength(0.5), ByLength(0), Noisy()])
def test_beside_dropout_how_many_records_there_are_is_asked(layer):
    with pytest.raises(MixesSamples, match="changes with how many records"):
        check_independence(inside(layer), (torch.randn(3, 4),))


class Several(nn.Module):
    """Noise on weights, a layer that is left out now and then, draws of all sizes: nothing of it belongs to several records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gru = nn.Linear(4, 3), nn.GRU(3, 3, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(3, 3, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.linear(x)[:, 0]
        weight = self.linear.weight + torch.randn(3, 4)
        h = F.linear(x, weight) if torch.rand(()) > 0.5 else self.linear(x)
        h = self.gru(h)[0] + torch.rand(len(x), 1, 1)
        h = self.attention(h, h, h)[0].transpose(0, 1)
        h = (h + torch.randn_like(h)).transpose(0, 1)
        return F.gumbel_softmax(h, dim=-1)[:, 0]


@pytest.mark.parametrize(
    "layer", [OnAverage(0.5, True), OnAverage(0.1, False), nn.AlphaDropout(0.5), OneKernel(), OneKernel(1)], ids=str
)
def test_what_is_drawn_for_each_record_passes(layer):
    net, x = inside(layer), torch.randn(3, 4)
    before = torch.random.get_rng_state()
    check_independence(net, (x,))
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_is_drawn_for_all_records_passes():
    check_independence(Several(), (torch.randn(3, 5, 4),))
