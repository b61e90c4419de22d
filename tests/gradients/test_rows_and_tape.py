"""Owners, views, padding, tied and repeated parameters, several forward passes, mistakes in the loop."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from erlangen.gradients import RowMap, Tape, attach, detach
from tests.gradients.reference import assert_same, one_by_one, recorded, seeded_loss

NET = lambda: nn.Sequential(  # noqa: E731
    nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
)


def by_owner(rows: dict, owner: list[int], reduce: str) -> dict:
    """The oracle: average or sum one-sample gradients over the rows of each owner."""
    labels = sorted({o for o in owner if o >= 0})
    combine = {"mean": lambda g: g.mean(0), "sum": lambda g: g.sum(0)}[reduce]
    pick = lambda label: [r for r, o in enumerate(owner) if o == label]  # noqa: E731
    return {n: torch.stack([combine(g[pick(label)]) for label in labels]) for n, g in rows.items()}


@settings(max_examples=25, deadline=None)
@given(
    owner=st.lists(st.integers(-1, 3), min_size=1, max_size=8).filter(lambda o: max(o) >= 0),
    reduce=st.sampled_from(("mean", "sum")),
    reduction=st.sampled_from(("mean", "sum")),
    strategy=st.sampled_from(("auto", "materialise", "norms-first")),
)
def test_any_owner_map(owner, reduce, reduction, strategy):
    torch.manual_seed(0)
    net = NET().double()
    x = torch.randn(len(owner), 2, 4, 4, dtype=torch.float64)
    got = recorded(net, (x,), rows=RowMap.of(torch.tensor(owner), reduce), loss_reduction=reduction, strategy=strategy)
    assert_same(got, by_owner(one_by_one(net, (x,)), owner, reduce))


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
@pytest.mark.parametrize("views", [1, 2, 3])
def test_views_are_averaged_before_clipping(views, strategy):
    torch.manual_seed(0)
    net = NET().double()
    x = torch.randn(4 * views, 2, 4, 4, dtype=torch.float64)
    got = recorded(net, (x,), rows=RowMap.regular(4, views), strategy=strategy)
    owner = [r // views for r in range(4 * views)]
    assert_same(got, by_owner(one_by_one(net, (x,)), owner, "mean"))


def test_a_regular_map_is_the_general_map_written_shorter():
    torch.manual_seed(0)
    net = NET().double()
    x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
    short = recorded(net, (x,), rows=RowMap.regular(3, 2))
    long = recorded(net, (x,), rows=RowMap.of(torch.tensor([0, 0, 1, 1, 2, 2])))
    for name in short.names:
        torch.testing.assert_close(short.dense(name), long.dense(name))


def test_padding_rows_contribute_nothing_even_if_they_are_nan():
    torch.manual_seed(0)
    net = NET().double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    padded = torch.cat([x, torch.full((2, 2, 4, 4), float("nan"), dtype=torch.float64)])
    got = recorded(net, (padded,), rows=RowMap.of(torch.tensor([0, 1, 2, -1, -1])))
    assert_same(got, one_by_one(net, (x,)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).tanh())


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x))) + self.layer(x)


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
def test_tied_and_repeated_parameters_have_one_gradient(strategy):
    torch.manual_seed(0)
    tokens = torch.tensor([[0, 1, 1], [2, 2, 4]])
    tied = Tied().double()
    assert_same(recorded(tied, (tokens,), strategy=strategy), one_by_one(tied, (tokens,)))
    repeated, x = Repeated().double(), torch.randn(3, 4, dtype=torch.float64)
    assert_same(recorded(repeated, (x,), strategy=strategy), one_by_one(repeated, (x,)))


def test_frozen_parameters_are_left_out():
    net = NET().double()
    net[0].weight.requires_grad_(False)
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    got = recorded(net, (x,))
    assert "0.weight" not in got.names
    assert_same(got, one_by_one(net, (x,)))


def test_two_forward_passes_and_one_backward():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    a, b = torch.randn(2, 5, 4, dtype=torch.float64)

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, a, b):
            return (self.net(a) - self.net(b)).square()

    module = Siamese()
    assert_same(recorded(module, (a, b)), one_by_one(module, (a, b)))


def test_dropout_is_differentiated_at_the_mask_it_drew():
    """The functional fallback runs forward once: with p=0.5 a second draw would give other gradients."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64, dtype=torch.float64))

        def forward(self, x):
            self.seen = nn.functional.dropout(x * self.w, 0.5)
            return self.seen

    module, x = Dropped(), torch.ones(4, 64, dtype=torch.float64)
    tape = Tape(dict(module.named_parameters()), "sum")
    attach(module, tape)
    out = module(x)
    out.sum().backward()
    torch.testing.assert_close(tape.gradients().dense("w"), out.detach())
    detach(module)


def test_backward_twice_is_an_error_and_zero_grad_discards():
    net = nn.Linear(3, 2)
    tape = Tape(dict(net.named_parameters()))
    attach(net, tape)
    net(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        net(torch.randn(4, 3)).sum().backward()
    tape.clear()
    net(torch.randn(4, 3)).sum().backward()
    assert tape.gradients().owners == 4
    with pytest.raises(RuntimeError, match="without a backward"):
        tape.gradients()


def test_rows_that_do_not_match_are_named():
    net = nn.Linear(3, 2)
    tape = Tape(dict(net.named_parameters()))
    attach(net, tape)
    with pytest.raises(RuntimeError, match=r"saw \d rows where \d were expected"):
        (net(torch.randn(3, 3)).sum() + net(torch.randn(4, 3)).sum()).backward()


def test_a_parameter_that_appeared_later_is_an_error():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    tape = Tape({n: p for n, p in net.named_parameters() if p.requires_grad})
    attach(net, tape)
    net[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="make_private again"):
        net(torch.randn(2, 3)).sum().backward()


def test_copies_and_pickles_are_ordinary_modules():
    net = NET()
    tape = Tape(dict(net.named_parameters()))
    attach(net, tape)
    x = torch.randn(2, 2, 4, 4)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        seeded_loss(other(x)).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
        assert not tape.complete
    assert list(net.state_dict()) == list(NET().state_dict())


def test_compiled_modules_record_too():
    torch.manual_seed(0)
    net = NET().double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    want = one_by_one(net, (x,))
    tape = Tape(dict(net.named_parameters()))
    attach(net, tape)
    seeded_loss(torch.compile(net, backend="eager")(x)).mean().backward()
    assert_same(tape.gradients(), want)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"strategy": "fast"}, "strategy is 'fast'"), ({"loss_reduction": "none"}, "loss_reduction is 'none'")],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        Tape({}, **options)


def test_bad_row_maps():
    with pytest.raises(ValueError, match="negative"):
        RowMap.of(torch.tensor([0, -2]))
    with pytest.raises(ValueError, match="reduce is 'max'"):
        RowMap.regular(2, 1, reduce="max")


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
def test_autocast_records_what_the_layers_computed(strategy):
    """bf16 products, float32 norms and sums: close to float32 gradients, and clipped contributions stay within C."""
    from erlangen.mechanisms import GaussianMechanism

    torch.manual_seed(0)
    net = NET()
    x = torch.randn(6, 2, 4, 4)
    want = one_by_one(net, (x,))
    tape = Tape(dict(net.named_parameters()), strategy=strategy)
    attach(net, tape)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    seeded_loss(out.float()).mean().backward()
    got = tape.gradients()
    for name, w in want.items():
        assert (got.dense(name).float() - w).norm() / w.norm() < 0.05, name
        assert got.norms_squared()[name].dtype == torch.float32
    mechanism = GaussianMechanism(0.0, 1e-3)
    mechanism.bind(dict(net.named_parameters()))
    total = torch.cat([g.double().flatten() for g in mechanism.release(got, 1).values()]).norm()
    assert total <= 6e-3
    detach(net)
