"""Kernels on more rows than one launch can have: the same as in one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from erlangen.gradients import kernels
from erlangen.gradients.kernels import conv_gradient as cg
from erlangen.gradients.kernels import moments as mo
from erlangen.gradients.kernels import norm_act as na
from erlangen.gradients.kernels import tied_sum as ti
from tests.kernels import DEVICE
from tests.kernels import channels_last as maps

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")


def everything() -> list[Tensor]:
    """What the kernels with rows on the second axis give for seven rows, or five owners of two."""
    torch.manual_seed(0)
    y, up, x, d = maps(7, 4, 4, 4), maps(7, 4, 4, 4), maps(10, 16, 5, 5), maps(10, 16, 5, 5)
    gamma, beta, spec = torch.randn(4, device=DEVICE), torch.randn(4, device=DEVICE), na.NormAct(2, 1e-5, pre="relu")
    g, w = torch.randn(7, 3, 20, device=DEVICE), torch.randn(3, 20, device=DEVICE)
    tied = torch.randn(7, 2, 4, 24, device=DEVICE)
    source = torch.stack([torch.randperm(24) for _ in range(4)]).to(DEVICE, torch.int32)
    z, mean, rstd = na.forward(y, gamma, beta, spec)
    options = (2, (3, 3), (1, 1), (1, 1), (1, 1))
    return [
        z, mean, rstd, *na.backward(y, up, gamma, beta, mean, rstd, spec), *cg.conv_gradient(x, d, *options, cg.OWNERS),
        *cg.conv_gradient(x, d, *options, cg.FILTERS), *mo.moments(g, w), *ti.tied_sum(tied, source, None, None),
    ]  # fmt: skip


def test_rows_are_cut_where_one_launch_cannot_have_them(monkeypatch):
    once = everything()
    for module in (na, cg, mo, ti):
        assert module.ROWS == 65_535
        monkeypatch.setattr(module, "ROWS", 2)
    several = everything()
    assert several[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(once, several, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)
