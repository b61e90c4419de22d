"""Tied copies added up in bags: the pullback of the kernel gradients, wherever it is taken, and only where it fits."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from erlangen.equivariant import (
    FieldType,
    SteerableConv2d,
    bags,
    cyclic,
    dihedral,
    fields,
    quotient,
    regular,
    regular_fields,
    trivial_fields,
)
from erlangen.gradients.rules import conv as rules
from erlangen.gradients.rules import unfolding
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.tracing import followed

D4, C4, D2 = dihedral(4), cyclic(4), dihedral(2)
LAYERS = {
    "regular": (regular_fields(D4, 2), regular_fields(D4, 8), 3),
    "pixel": (regular_fields(C4, 3), regular_fields(C4, 9), 3),
    "half of the group": (regular_fields(D2, 5), regular_fields(D2, 8), 3),
    "images": (trivial_fields(D4, 3), regular_fields(D4, 8), 5),
    "quotients": (fields([quotient(D4, dihedral(1))] * 3), regular_fields(D4, 10), 3),
}


def example(name: str, dtype: torch.dtype = torch.float64, owners: int = 5, views: int = 2) -> tuple[SteerableConv2d, Conv]:
    torch.manual_seed(0)
    inner, outer, size = LAYERS[name]
    layer = SteerableConv2d(inner, outer, size, basis="pixel" if name == "pixel" else "steerable").to(dtype)
    g = Geometry((size, size), (2, 1), (1, 2), (1, 1), 1)
    x = torch.randn(owners * views, inner.size, 7, 6, dtype=dtype)
    out = [(n + 2 * p - size) // s + 1 for n, p, s in zip(x.shape[2:], g.padding, g.stride, strict=True)]
    return layer, Conv(x, torch.randn(len(x), outer.size, *out, dtype=dtype), views, (outer.size, inner.size, size, size), g)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_bags_are_the_pullback_of_kernel_gradients(name, last, monkeypatch):
    """Whichever axis of a window is innermost, and however many owners are formed at a time."""
    way = next(w for w in unfolding.WAYS if w.last is last)
    for where in (rules, unfolding):
        monkeypatch.setattr(where, "cheapest", lambda *args: way)
    layer, conv = example(name)
    assert bags.suits(conv, layer.expansion)
    wanted = layer.expansion.pullback(conv.dense())
    entries = math.prod(conv.shape[1:]) * max(conv.tokens, conv.shape[0])
    for room in (1, 2 * entries, 1 << 24):  # parts grow: tables of fewer owners are known already, or have to be made
        monkeypatch.setattr(rules, "WINDOW_FLOATS", room)
        torch.testing.assert_close(bags.coefficient_gradients(conv, layer.expansion), wanted)
    assert set(bags._PLACES[layer.expansion]) == {last}


def test_a_wrong_place_is_caught():
    """The broken twin: two places of one table are exchanged."""
    layer, conv = example("regular")
    bags.coefficient_gradients(conv, layer.expansion)
    known = bags._PLACES[layer.expansion]
    ((last, table),) = known.items()
    table[[0, 1], 0] = table[[1, 0], 0]
    found, wanted = bags.coefficient_gradients(conv, layer.expansion), layer.expansion.pullback(conv.dense())
    assert float((found - wanted).norm()) > 1e-3 * float(wanted.norm())
    assert known[last] is table


def test_only_layers_that_fit_are_added_up_in_bags():
    layer, conv = example("regular")
    few = SteerableConv2d(regular_fields(D4, 2), regular_fields(D4, bags.FEWEST - 1), 3)
    mixed = SteerableConv2d(fields([regular(D4), regular(D4)]), fields([regular(D4)] * 8 + [quotient(D4, dihedral(1))]), 3)
    rotations = SteerableConv2d(regular_fields(cyclic(8), 2), regular_fields(cyclic(8), 8), 3)
    assert bags.tied_block(layer.expansion) is not None
    assert [bags.tied_block(m.expansion) is None for m in (mixed, rotations)] == [True, True]
    assert not bags.suits(conv, few.expansion)
    half = Conv(conv.x.bfloat16(), conv.d.bfloat16(), 2, conv.shape, conv.geometry)
    empty = Conv(conv.x[:0], conv.d[:0], 2, conv.shape, conv.geometry)
    assert not bags.suits(half, layer.expansion)
    assert not bags.suits(empty, layer.expansion)
    with followed():  # a graph sees plain operations
        assert not bags.suits(conv, layer.expansion)


def test_interleaved_fields_are_left_to_the_pullback():
    kinds = [regular(D4), quotient(D4, dihedral(1)), regular(D4)] * 4
    layer = SteerableConv2d(FieldType(D4, tuple(kinds)), regular_fields(D4, 8), 3)
    assert bags.tied_block(layer.expansion) is None


def test_tables_go_with_their_layer():
    layer, conv = example("regular", torch.float32)
    other = copy.deepcopy(layer)
    for one in (layer, other):
        bags.coefficient_gradients(conv, one.expansion)
    assert bags._PLACES[layer.expansion] is not bags._PLACES[other.expansion]
    before = len(bags._PLACES)
    del one, other
    assert len(bags._PLACES) < before


def test_rows_of_nobody_and_non_finite_ones_stay_their_own():
    """What one owner holds reaches no other, in a product or in a bag."""
    layer, conv = example("regular", torch.float32)
    wanted = bags.coefficient_gradients(conv, layer.expansion)
    for value, row in itertools.product((math.nan, math.inf, 1e38), (2, 7)):  # views of owners 1 and 3
        x = conv.x.clone()
        x[row] = value
        spoilt = bags.coefficient_gradients(Conv(x, conv.d, 2, conv.shape, conv.geometry), layer.expansion)
        others = [k for k in range(conv.count) if k != row // 2]
        assert torch.equal(spoilt[others], wanted[others])
        assert not torch.equal(spoilt[row // 2], wanted[row // 2])
