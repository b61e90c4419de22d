"""The closed form of weight standardisation against one sample at a time, `torch.func` and the Jacobian."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from erlangen.gradients import RowMap, Tape, kernels
from erlangen.gradients.pieces import Dense
from erlangen.gradients.registry import find_rule
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.standardised import MARGIN, Projection, Standardised
from erlangen.models.resnet import wide_resnet
from erlangen.models.standardised import StandardisedConv2d, standardise
from tests.gradients.reference import assert_same, one_by_one, recorded

STRATEGIES = ("auto", "materialise", "norms-first")
CASES = {
    "plain": (lambda: StandardisedConv2d(3, 5, 3), (3, 6, 6)),
    "strided": (lambda: StandardisedConv2d(4, 6, 3, 2, padding=1, bias=False), (4, 7, 5)),
    "grouped": (lambda: StandardisedConv2d(4, 6, 3, groups=2, dilation=2), (4, 8, 8)),
    "pointwise": (lambda: StandardisedConv2d(6, 4, 1), (6, 3, 3)),
    "reflected": (lambda: StandardisedConv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "uneven": (lambda: StandardisedConv2d(2, 3, 4, padding="same"), (2, 5, 5)),
    "few positions": (lambda: StandardisedConv2d(32, 40, 3, padding=1), (32, 2, 2)),
    "few positions, grouped": (lambda: StandardisedConv2d(64, 64, 3, padding=1, groups=2), (64, 2, 2)),
    "large eps": (lambda: StandardisedConv2d(3, 5, 3, eps=0.3), (3, 6, 6)),
    "network": (lambda: wide_resnet(10, 1, norm_groups=4), (3, 8, 8)),
}


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    return make().to(dtype), torch.randn(4, *shape, dtype=dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_as_one_sample_at_a_time(name: str, strategy: str) -> None:
    module, x = build(name, torch.float64)
    got = recorded(module, (x,), strategy=strategy, loss_reduction="sum")
    assert_same(got, one_by_one(module, (x,)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_single_precision_views_and_rows_of_any_owner(strategy: str) -> None:
    module, x = build("few positions", torch.float32)
    per_row = one_by_one(module, (x,))
    views = recorded(module, (x,), rows=RowMap.regular(2, 2), strategy=strategy)
    assert_same(views, {n: g.unflatten(0, (2, 2)).mean(1) for n, g in per_row.items()}, torch.float32, 1e-3)
    owners = recorded(module, (x,), rows=RowMap.of(torch.tensor([2, -1, 2, 5])), strategy=strategy)
    want = {n: torch.stack([(g[0] + g[2]) / 2, g[3]]) for n, g in per_row.items()}
    assert_same(owners, want, torch.float32, 1e-3)


def test_as_torch_func() -> None:
    module, x = build("plain", torch.float64)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    loss = lambda out: out.sin().flatten(1).sum(1)  # noqa: E731
    alone = lambda p, row: loss(torch.func.functional_call(module, p, (row[None],))).sum()  # noqa: E731
    want = torch.func.vmap(torch.func.grad(alone), (None, 0))(parameters, x)
    for strategy in STRATEGIES:
        assert_same(recorded(module, (x,), loss, strategy=strategy), want)


class AsParametrization(nn.Module):
    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return standardise(v)[0]


def test_as_the_pullback_through_the_jacobian() -> None:
    """The general way for computed weights gives the same numbers, and would still serve a user's own."""
    module, x = build("strided", torch.float64)
    general = nn.Conv2d(4, 6, 3, 2, padding=1, bias=False).double()
    general.weight.data.copy_(module.weight.data)
    parametrize.register_parametrization(general, "weight", AsParametrization())
    got, want = recorded(module, (x,)), recorded(general, (x,))
    torch.testing.assert_close(got.dense("weight"), want.dense("parametrizations.weight.original"))


def test_the_layer_has_its_rule_and_a_changed_forward_does_not() -> None:
    class Shifted(StandardisedConv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + self.weight.mean()

    assert find_rule(StandardisedConv2d(2, 2, 1)) is not None
    assert find_rule(Shifted(2, 2, 1)) is None
    torch.manual_seed(0)
    module, x = Shifted(2, 3, 3).double(), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    assert_same(recorded(module, (x,), loss_reduction="sum"), one_by_one(module, (x,)))


def test_gradients_of_the_owner_are_not_formed() -> None:
    """Norms and sums go through the gradients of the filters, or through none at all."""
    module, x = build("few positions", torch.float32)
    got = recorded(module, (x,))
    piece = got._pieces["weight"]
    assert isinstance(piece, Standardised)
    assert isinstance(piece.inner, Conv)
    module, x = build("plain", torch.float32)
    piece = recorded(module, (x,))._pieces["weight"]
    assert isinstance(piece, Standardised)
    assert isinstance(piece.inner, Dense)


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 5), size=st.integers(2, 30), owners=st.integers(1, 4), seed=st.integers(0, 2**16),
    along=st.floats(0, 1e4), mean=st.floats(0, 1e4), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)  # fmt: skip
def test_a_norm_is_never_measured_too_small(outputs, size, owners, seed, along, mean, scale) -> None:
    """Gradients nearly along what standardisation forgets: differences of squares cancel, and must not hide anything."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(outputs, size, generator=generator)
    g = torch.randn(owners, outputs, size, generator=generator) + mean
    projection = Projection(*standardise(v))
    g = (g + along * projection.filters) * scale
    measured = Standardised(Dense(g), projection).norms_squared().double()
    exact = Projection(*standardise(v.double())).pull(g.double()).flatten(1).square().sum(1)
    assert bool((measured >= exact * (1 - 1e-5)).all())
    total = (g.double() / standardise(v.double())[1]).flatten(1).square().sum(1)
    assert bool((measured <= exact * (1 + 1e-5) + 2 * MARGIN * torch.finfo(g.dtype).eps * total).all())


def test_gram_norms_of_what_is_forgotten_are_not_too_small() -> None:
    """The same without forming gradients: the input is constant, so that nearly all of g_w is its mean."""
    torch.manual_seed(1)
    v = torch.randn(8, 16, 1, 1)
    x, d = 1e3 + torch.randn(3, 16, 2, 2), torch.randn(3, 8, 2, 2)
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    projection = Projection(*standardise(v))
    conv = Conv(x, d, 1, v.shape, geometry)
    measured = Standardised(conv, projection)._gram(conv).double()
    exact = Projection(*standardise(v.double()))
    of_filters = Conv(x.double(), d.double(), 1, v.shape, geometry).dense()
    g = exact.pull(of_filters).flatten(1).square().sum(1)
    total = (of_filters / exact.deviation).flatten(1).square().sum(1)
    assert bool((measured >= g * (1 - 1e-4)).all())
    assert bool((measured <= 1.1 * g + 2 * MARGIN * torch.finfo(x.dtype).eps * total).all())


def test_owners_that_are_not_finite_contribute_nothing() -> None:
    module, x = build("few positions", torch.float32)
    x[1] = math.inf
    for strategy in STRATEGIES:
        got = recorded(module, (x,), strategy=strategy)
        bad = ~torch.isfinite(sum(got.norms_squared().values()))
        assert bad.tolist() == [False, True, False, False]
        sums = got.without(bad).weighted_sum({n: torch.ones(4) for n in got.names})
        assert all(bool(torch.isfinite(s).all()) for s in sums.values())


@pytest.mark.parametrize("name", ["plain", "few positions", "grouped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_batch_has_no_gradients(name: str, strategy: str) -> None:
    module, x = build(name, torch.float32)
    got = recorded(module, (x[:0],), strategy=strategy, loss_reduction="sum")
    assert all(norms.shape == (0,) for norms in got.norms_squared().values())
    sums = got.weighted_sum({n: torch.zeros(0) for n in got.names})
    assert all(bool((s == 0).all()) and s.shape == module.get_parameter(n).shape for n, s in sums.items())


def test_a_pullback_that_forgets_the_mean_is_caught() -> None:
    class Forgetful(Projection):
        def pull(self, g: torch.Tensor) -> torch.Tensor:
            along = (g * self.filters).sum((-3, -2, -1), keepdim=True)
            return (g - self.filters * along) / self.deviation

    module, x = build("plain", torch.float64)
    right = recorded(module, (x,), strategy="norms-first")
    piece = right._pieces["weight"]
    wrong = Forgetful(piece.projection.filters, piece.projection.deviation).pull(piece.inner.dense())
    assert (wrong - right._pieces["weight"].dense()).norm() > 1e-3 * wrong.norm()


def test_filters_are_computed_anew_for_every_logical_batch(monkeypatch):
    """Physical parts of a batch share them; an optimizer that writes to ``p.data`` leaves no trace in a parameter's version."""
    pytest.importorskip("triton")
    from erlangen.gradients.rules.standardised import _projection

    conv = StandardisedConv2d(4, 4, 3)
    tape, other, x = Tape(dict(conv.named_parameters())), Tape(dict(conv.named_parameters())), torch.randn(1, 4, 5, 5)
    assert _projection(conv, tape, x) is not _projection(conv, tape, x), "on a CPU nothing is kept"
    monkeypatch.setattr(kernels, "FORCED", True)
    before = _projection(conv, tape, x)
    assert _projection(conv, tape, x) is before
    assert _projection(conv, other, x) is not before
    before = _projection(conv, tape, x)
    copy.deepcopy(conv)
    pickle.loads(pickle.dumps(conv))
    conv.weight.data.normal_()
    tape.logical += 1
    after = _projection(conv, tape, x)
    torch.testing.assert_close(after.filters, standardise(conv.weight, conv.eps)[0])
    assert not torch.equal(after.filters, before.filters)
    with torch.no_grad():
        conv.weight.mul_(2.0).add_(torch.randn_like(conv.weight))
    assert _projection(conv, tape, x) is not after, "a change that autograd knows of"
