"""Max pooling the faster way is PyTorch's to the bit: values, gradients, ties, NaN; averages are to rounding.

The module stays the user's.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from erlangen.gradients import attach, detach, kernels
from erlangen.gradients.joined import join
from erlangen.gradients.pooling import max_pool2d
from erlangen.gradients.tape import Tape
from tests.kernels import channels_last


def both(x: Tensor, **options: object) -> list[tuple[Tensor, Tensor]]:
    """Values and gradients, ours and PyTorch's, for one cotangent."""
    found = []
    for pool in (max_pool2d, F.max_pool2d):
        own = x.clone().requires_grad_()
        y = pool(own, **options)  # type: ignore[operator]
        cotangent = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)
        found.append((y, torch.autograd.grad(y, own, cotangent)[0]))
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and bool(((a == b) | (a.isnan() & b.isnan())).all())


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 3), channels=st.integers(1, 9), height=st.integers(1, 9), width=st.integers(1, 9),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.integers(1, 3), padding=st.integers(0, 2),
    dilation=st.integers(1, 2), ceil_mode=st.booleans(), values=st.sampled_from(["ties", "normal", "hostile"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_values_and_gradients_are_those_of_pytorch(
    rows, channels, height, width, kernel, stride, padding, dilation, ceil_mode, values, dtype, seed
) -> None:
    assume(padding <= min(kernel) // 2)
    assume(not padding or dilation == 1)  # PyTorch's own gradient writes anywhere if a window lies in the padding alone
    assume(all(n + 2 * padding >= dilation * (k - 1) + 1 for n, k in zip((height, width), kernel)))
    torch.manual_seed(seed)
    x = torch.randn(rows, channels, height, width, dtype=dtype)
    if values == "ties":
        x = x.relu().round()
    if values == "hostile":
        x = x.masked_fill(torch.rand_like(x) < 0.3, -torch.inf).masked_fill(torch.rand_like(x) < 0.1, torch.nan)
    options = dict(kernel_size=kernel, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)
    (y, g), (expected, wanted) = both(x, **options)
    assert same(y, expected)
    assert same(g, wanted)


def test_it_is_taken_where_it_is_faster_and_only_there() -> None:
    wide, thin = torch.randn(2, 8, 6, 6), torch.randn(2, 2, 6, 6)
    others = (thin, wide.to(memory_format=torch.channels_last), wide[:0], wide[0], wide.bfloat16())
    for x, taken in ((wide, True), *((x, False) for x in others)):
        y = max_pool2d(x.requires_grad_(), 2)
        assert torch.equal(y, F.max_pool2d(x, 2))
        assert (y.grad_fn.name() != "MaxPool2DWithIndicesBackward0") == taken


def test_second_derivatives_and_transforms_are_those_of_pytorch() -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: max_pool2d(t, 2, 1) ** 3, (x,))
    many = torch.randn(3, 2, 4, 6, 6)
    loss = lambda pool: lambda t: pool(t, 2).square().sum()  # noqa: E731
    ours, theirs = (torch.func.vmap(torch.func.grad(loss(pool)))(many) for pool in (max_pool2d, F.max_pool2d))
    assert torch.equal(ours, theirs)


class Scaled(nn.Module):
    """A parameter of its own beside a pool: the fallback runs the pool inside ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * self.scale)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, 1), Scaled(), nn.Flatten(), nn.Linear(4 * 2 * 2, 3)
    )


def test_per_sample_gradients_through_pools() -> None:
    model, x, y = network(), torch.randn(5, 1, 7, 7), torch.tensor([0, 1, 2, 0, 1])
    wanted = []
    for k in range(5):
        model.zero_grad()
        F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        wanted.append({n: p.grad.clone() for n, p in model.named_parameters()})
    tape = Tape(dict(model.named_parameters()))
    attach(model, tape)
    F.cross_entropy(model(x), y).backward()
    found = tape.gradients()
    for name in found.names:
        torch.testing.assert_close(found.dense(name), torch.stack([w[name] for w in wanted]), rtol=1e-4, atol=1e-6)


def test_the_module_stays_the_users() -> None:
    model = network()
    pool = model[2]
    attach(model, Tape(dict(model.named_parameters())))
    assert "forward" in pool.__dict__
    assert copy.deepcopy(model)[2].forward.__func__ is nn.MaxPool2d.forward
    assert torch.equal(pickle.loads(pickle.dumps(pool))(torch.ones(1, 4, 3, 3)), torch.ones(1, 4, 2, 2))
    detach(model)
    assert "forward" not in pool.__dict__


@pytest.mark.parametrize("kind", ["indices", "subclass", "own"])
def test_pools_that_do_something_else_are_left_alone(kind: str) -> None:
    class Mine(nn.MaxPool2d):
        pass

    pool = {"indices": nn.MaxPool2d(2, return_indices=True), "subclass": Mine(2), "own": nn.MaxPool2d(2)}[kind]
    if kind == "own":
        pool.forward = lambda x: x  # type: ignore[method-assign]
    before = pool.__dict__.get("forward")
    model = nn.Sequential(pool)
    attach(model, Tape({}))
    assert pool.__dict__.get("forward") is before
    join(model)
    assert pool.__dict__.get("forward") is before


@pytest.fixture
def as_where_kernels_run(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "FORCED", True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [2, 3])
def test_averages_of_tiles_are_pytorchs(k, dtype, as_where_kernels_run):
    torch.manual_seed(0)
    x = channels_last(3, 10, 2 * k, 4 * k, dtype=dtype).requires_grad_()
    plain, fast = nn.AvgPool2d(k), join(nn.AvgPool2d(k))
    out, want = fast(x), plain(x)
    assert "Tiles" in type(out.grad_fn).__name__
    assert out.is_contiguous(memory_format=torch.channels_last)
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(out, want, **near)
    cotangent = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(o, x, cotangent)[0] for o in (out, want))
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2, 1), nn.AvgPool2d(3, padding=1), nn.AvgPool2d((2, 3)), nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3), nn.AvgPool2d(4), nn.AvgPool2d(1),
    ],
    ids=str,
)  # fmt: skip
def test_other_averages_are_taken_as_ever(pool, as_where_kernels_run):
    """Windows that overlap, reach over the edge, leave some of the map out or divide by another number; maps laid out otherwise."""
    x = channels_last(2, 5, 6, 6).requires_grad_()
    fast = join(copy.deepcopy(pool))
    out = fast(x)
    assert torch.equal(out, pool(x))
    assert "Tiles" not in type(out.grad_fn).__name__
    if pool.kernel_size == 2 and pool.stride == 2:
        assert torch.equal(fast(x.contiguous()), pool(x.contiguous()))
    assert fast(x[:0]).shape == pool(x[:0]).shape
