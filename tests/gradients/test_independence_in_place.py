"""What a module makes of its inputs before its own forward, or in place, is its own doing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from erlangen.gradients.independence import MixesSamples, check_independence


class InPlace(nn.Module):
    """What it is given is changed in place: by the whole batch, or each row by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.trunk, self.head = how, nn.Linear(4, 4), nn.Linear(4, 2)
        self.trunk.requires_grad_(False)

    def forward(self, x):
        if self.how == "mean":
            x -= x.mean(0, keepdim=True)
        elif self.how == "largest":
            x /= x.abs().max()
        else:
            x -= x.mean(1, keepdim=True)
        return self.head(self.trunk(x))


def hooked(dim, inside):
    """The same in a hook of the module itself, or of one inside."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net.get_submodule(inside).register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(dim, keepdim=True),))
    return net


@pytest.mark.parametrize("module", [InPlace("mean"), InPlace("largest"), hooked(0, ""), hooked(0, "1")])
def test_mixing_before_a_module_s_own_forward_or_in_place_is_named(module):
    """A mean of 3 taken off in place: one record more moved the sum of the others by 123 bounds."""
    x = torch.randn(3, 4)
    before = x.clone()
    with pytest.raises(MixesSamples, match=r"\(the module itself\) mixes|at '1' mixes"):
        check_independence(module, (x,))
    assert torch.equal(x, before)


@pytest.mark.parametrize("module", [InPlace("rows"), hooked(1, ""), hooked(1, "1")])
def test_each_row_by_itself_may_be_changed_in_place(module):
    check_independence(module, (torch.randn(3, 4),))


def test_a_call_that_raises_inside_is_not_taken_for_another():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.raises, self.head = Raises(), nn.Linear(4, 2)

        def forward(self, x):
            with contextlib.suppress(ValueError):
                self.raises(x)
            return self.head(x)

    check_independence(Tries(), (torch.randn(3, 4),))
