"""Modules that mix records where there are many of them: what three show of them is nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.gradients.independence import MANY, MixesSamples, check_independence
from erlangen.gradients.rows import RowMap
from tests.engines import private


class InChunks(nn.Module):
    """Statistics of every 16 records; what is left over stays as it is."""

    def forward(self, x):
        whole = lambda part: (part - part.mean(0)) / (part.std(0) + 1e-3)  # noqa: E731
        return torch.cat([whole(part) if len(part) == 16 else part for part in x.split(16)]) if len(x) else x


class Sorts(nn.Module):
    def forward(self, x):
        return x[x.sum(1).argsort()] if len(x) > 10 else x


def net(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), middle, nn.Linear(8, 2))


@pytest.mark.parametrize("middle", [InChunks(), Sorts()], ids=["chunks", "sorted"])
def test_a_module_that_mixes_in_larger_batches_is_refused(middle):
    with pytest.raises(MixesSamples, match=f"at '2' mixes samples in larger batches: in one of {MANY} records"):
        private(net(middle))


def test_what_it_would_move():
    """One record of twenty moves the sum of the others' gradients by more than a bound."""
    x, y = torch.randn(20, 2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2

    def total(rows):
        engine, model, optimizer, _ = private(net(InChunks()), noise_multiplier=0.0, max_grad_norm=0.1, check=False)
        engine.training.announce(RowMap.regular(len(rows)), True, False)
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        return torch.cat([t.flatten() for t in engine.training.mechanism.clipped_sum().values()])

    every = list(range(20))
    assert max(float((total(every) - total(every[:k] + every[k + 1 :])).norm()) for k in (0, 7, 15)) > 1.2 * 0.1


def test_honest_modules_of_any_size_pass_and_are_as_they_were():
    for module, shape in (
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (33, 8)),  # as many tokens as rows would be
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Dropout(0.5)), (3, 40, 40)),
        (nn.Conv2d(3, 2, 3), (3, 500, 500)),  # too large for many
    ):
        before = [p.clone() for p in module.eval().parameters()]
        check_independence(module, (torch.randn(3, *shape),))
        assert not module.training
        assert all(map(torch.equal, before, module.parameters()))
