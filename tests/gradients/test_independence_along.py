"""Modules that run along the batch are caught at its other end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from erlangen.gradients.independence import MixesSamples, check_independence


class Along(nn.Module):
    """A frozen trunk for sequences [batch, time, features], of which some take records for time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(6, 2)
        self.gru = nn.GRU(6, 6, batch_first=how != "recurrent").requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 1, batch_first=how != "attention").requires_grad_(False)
        self.register_buffer("places", 5 * torch.randn(100, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = 0 if self.how == "attention" else 1
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[time])
        if self.how == "sum":
            x = x.cumsum(0)
        if self.how == "sum backwards":
            x = x.flip(0).cumsum(0).flip(0)
        x = x + (self.places[: len(x)] if self.how == "places" else self.places[: x.shape[1], 0])
        return self.head(self.attention(*[self.gru(x)[0]] * 3, attn_mask=mask, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("how", ["recurrent", "attention", "sum", "sum backwards", "places"])
def test_what_runs_along_the_batch_is_refused(how):
    """It leaves the first record as it is (or the last), and moved the sum of all others by 138 bounds."""
    torch.manual_seed(0)
    with pytest.raises(MixesSamples, match="one record changes with"):
        check_independence(Along(how), (torch.randn(3, 5, 6),))


def test_what_runs_along_time_passes():
    torch.manual_seed(0)
    check_independence(Along("time"), (torch.randn(3, 5, 6),))


def test_what_draws_random_numbers_when_it_is_used_is_no_matter_of_places():
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    check_independence(Draws(4, 2), (torch.randn(3, 4),))


class BackAlong(torch.autograd.Function):
    """Identity forwards; backwards each record is divided by the norms of itself and of those before it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent / cotangent.detach().norm(dim=1, keepdim=True).cumsum(0)


def test_a_backward_pass_that_runs_along_the_batch_is_refused():
    class Back(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return BackAlong.apply(x)

    with pytest.raises(MixesSamples, match="on its way back"):
        check_independence(nn.Sequential(nn.Linear(4, 2), Back()), (torch.randn(3, 4),))


def test_lengths_are_compared_wherever_the_longest_is():
    """The ends hold the longest of [3, 1, 3]: only the record between is seen to change with them."""

    class Trims(nn.Linear):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, : int(lengths.max())].mean(1))

    for lengths in ([3, 1, 3], [1, 3, 3], [1, 1, 3]):
        with pytest.raises(MixesSamples):
            check_independence(Trims(4, 2), (torch.randn(3, 5, 4), torch.tensor(lengths)))
