"""Pieces of per-row gradients: norms and sums of exactly the stored values, by kernels and by their twins."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from erlangen.training.stacked import Stack
from erlangen.training.stacked_rows import Fields, Formed, Outer, Rows, Taps, norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS, COUNT = 3, 5


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def piece(kind: str) -> Rows:
    torch.manual_seed(0)
    n = MODELS * COUNT
    if kind == "outer":
        return Outer(MODELS, random(n, 4), random(n, 6))
    if kind == "taps":
        order = Taps(4, 9, 3, 32)
        return Formed(MODELS, order.write(random(n, 108), 0.0).bfloat16(), order)
    return Formed(MODELS, random(n, 7, 100).to(torch.bfloat16 if kind == "half" else torch.float32))


KINDS = ["outer", "taps", "half", "single"]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_the_dense_rows(path, kind):
    rows = piece(kind)
    dense = rows.dense().double()
    metric = torch.rand(MODELS, dense.shape[2], device=DEVICE) + 0.5
    wide = torch.cat([metric, metric], 1)[:, : dense.shape[2]]  # a slice of a longer vector
    weights = torch.rand(MODELS, COUNT, device=DEVICE)
    torch.testing.assert_close(rows.energy(), dense.square().sum(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows.energy(wide), (dense / metric[:, None].double()).square().sum(2), rtol=1e-6, atol=0)
    want = (weights[..., None].double() * dense).sum(1)
    torch.testing.assert_close(rows.weighted_sum(weights).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_of_weight_zero_leaves_no_trace(path, kind, value):
    rows, spoilt = piece(kind), piece(kind)
    for name in ("d", "a") if kind == "outer" else ("values",):
        getattr(spoilt, name)[1, 2] = value
    weights = torch.rand(MODELS, COUNT, device=DEVICE)
    weights[1, 2] = 0.0
    assert not torch.isfinite(norms([spoilt.energy()], torch.float32)[1, 2])
    assert torch.equal(rows.weighted_sum(weights), spoilt.weighted_sum(weights))
    broken = (weights[..., None] * spoilt.dense()).sum(1)
    assert not torch.isfinite(broken).all(), "0 · NaN would have been caught"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e12])
def test_a_clipped_row_alone_has_at_most_its_bound(path, kind, size):
    rows = piece(kind)
    for name in ("d",) if kind == "outer" else ("values",):
        getattr(rows, name).mul_(size)
    found = norms([rows.energy()], torch.float32)
    for k in range(COUNT):
        weights = torch.zeros(MODELS, COUNT, device=DEVICE)
        weights[:, k] = 1.0 / found[:, k]
        length = rows.weighted_sum(weights).double().norm(dim=1)
        assert float(length.max()) <= 1 + 32 * torch.finfo(torch.float32).eps


def test_many_small_entries_count_beside_large_ones(path):
    """Squares below the rounding of a running float32 sum: each is lost beside a one, together they are not."""
    g = torch.full((1, 1, 300 * 4096), 2.0**-12.6, device=DEVICE)
    g[..., :4096] = 1.0
    assert float((Formed(1, g[0]).energy() / g.double().square().sum(2)).min()) > 1 - 3e-6


def test_small_times_large_is_measured():
    """‖d‖² would vanish in float32, and the row with it; the product of the two is far from zero."""
    rows = Outer(1, torch.full((1, 2), 1e-25), torch.full((1, 2), 1e28))
    assert float(norms([rows.energy()], torch.float32)) == pytest.approx(2e3, rel=1e-5)


def test_orders_are_inverse():
    order, values = Taps(4, 9, 3, 32), torch.randn(2, 108)
    stored = order.write(values, 7.0)
    assert torch.equal(order.read(stored), values)
    assert int((stored == 7.0).sum()) == 2 * 4 * 5
    pairs = Fields(2, 3)
    assert torch.equal(pairs.read(pairs.write(values, 0.0)), values)
    assert not torch.equal(pairs.write(values, 0.0), values)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).relu())


def test_a_layer_used_twice_has_one_gradient():
    torch.manual_seed(0)
    models = [Twice().double() for _ in range(2)]
    stack, x, y = Stack(models, 1), torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 3])
    found = stack.dense(stack.backward(stack(x), y))
    for k, model in enumerate(models):
        nn.functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(found[k, 0], want, rtol=1e-5, atol=1e-8)


def test_a_stack_that_nobody_holds_is_gone_without_a_collection():
    """A cycle would keep gigabytes of a GPU until the collector happens to run."""
    stack = Stack([nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)) for _ in range(2)], 1)
    stack.backward(stack(torch.randn(2, 1, 4, 4)), torch.tensor([0, 1]))
    flat = weakref.ref(stack.flat)
    skeleton = weakref.ref(stack.skeleton)
    gc.disable()
    try:
        del stack
        assert flat() is None
        assert skeleton() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bound", [1e-12, 1.0, 1e6])
def test_weighted_outer_products_neither_overflow_nor_lose_their_bits(bound: float) -> None:
    """w·d would be infinite for the first rows (AUTO-S has weights above 1), a multiple of the least number for others."""
    pairs = [(1e38, 1e-40), (3e38, 0.0), (0.0, 3e38), (1e-44, 1e38), (4.2e-45, 2e38), (7e-45, 1.7e38), (1.0, 1.0)]
    for d, a in pairs:
        rows = Outer(1, torch.full((1, 3), d), torch.full((1, 5), a))
        length = norms([rows.energy()], torch.float32)
        for weights in (bound / (length + 0.01), (bound / length).clamp(max=1.0)):
            added = rows.weighted_sum(weights).double().norm()
            assert float(added) <= bound * (1 + 1e-6), (d, a)
