"""Coefficients that are added up where they are formed: those of kernel gradients, for every group, shape and precision."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.equivariant import (
    SteerableConv2d,
    cyclic,
    dihedral,
    regular_fields,
    trivial_fields,
)
from erlangen.equivariant.tied import (
    TiedCopies,
    blocks_of,
    coefficient_gradients,
    jacobian,
    summed_gradients,
    tied_copies,
)
from erlangen.gradients import RowMap, Tape, attach, detach, kernels
from erlangen.gradients.kernels import conv_copies, conv_gradient, tuned
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.steerable import Ordered
from tests.kernels import DEVICE, HALF, channels_last, close

D4, C4, D2 = dihedral(4), cyclic(4), dihedral(2)
SETTING = tuned.Copies(64, 32, 4, 3)
#: fields in, fields out, taps along a side, basis
LAYERS = {
    "D4, exact": (regular_fields(D4, 2), regular_fields(D4, 3), 3, "pixel"),
    "D4, steerable": (regular_fields(D4, 2), regular_fields(D4, 2), 3, "steerable"),
    "D4, more rows than a program has": (regular_fields(D4, 2), regular_fields(D4, 17), 3, "pixel"),
    "C4, taps of five": (regular_fields(C4, 4), regular_fields(C4, 4), 5, "pixel"),
    "half of D4": (regular_fields(D2, 4), regular_fields(D2, 5), 3, "steerable"),
    "C2": (regular_fields(cyclic(2), 8), regular_fields(cyclic(2), 9), 3, "pixel"),
    "channels that are no multiple of eight": (regular_fields(C4, 5), regular_fields(C4, 4), 3, "pixel"),
}


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(kernels, "FORCED", True)


def layer_of(name: str, standardise: bool = False) -> SteerableConv2d:
    torch.manual_seed(0)
    inner, outer, size, basis = LAYERS[name]
    return SteerableConv2d(inner, outer, size, padding=size // 2, basis=basis, standardise=standardise).to(DEVICE)


def operands(layer: SteerableConv2d, stride: int = 1, views: int = 2, owners: int = 3) -> tuple[Tensor, Tensor, tuple]:
    size, pair = layer.kernel_size, lambda n: (n, n)
    x = channels_last(owners * views, layer.in_type.size, 5, 6, dtype=HALF)
    height, width = ((n + 2 * (size // 2) - size) // stride + 1 for n in (5, 6))
    d = channels_last(owners * views, layer.out_type.size, height, width, dtype=HALF)
    return x, d, (pair(size), pair(stride), pair(size // 2), pair(1))


def _order(tables: TiedCopies) -> Tensor:
    fields = torch.arange(tables.fields, device=tables.order.device)
    return (fields[:, None] * tables.order.numel() + tables.order).flatten()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_are_closed_under_all_copies(name, width):
    tables = tied_copies(layer_of(name).expansion)
    blocks = blocks_of(tables, width)
    length = tables.source.shape[1]
    columns, place = blocks.columns.long(), torch.arange(length)
    assert sorted(columns.tolist()) == list(range(length))
    assert blocks.local.shape[1] % width == 0
    assert bool((blocks.local < min(width, length)).all())
    entries = columns[place // width * width + blocks.local[:, :length].long()]  # [copies, L]
    assert torch.equal(entries[0], columns)
    wanted = {tuple(c) for c in tables.source.T.tolist()}
    assert {tuple(c) for c in entries.T.tolist()} == wanted
    runs = columns.view(-1, blocks.vector)
    assert bool((runs == runs[:, :1] + torch.arange(blocks.vector)).all())
    assert not bool((runs[:, 0] % blocks.vector).any())
    assert tables.channels % blocks.vector == 0


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_those_of_kernel_gradients(forced, name, stride, standardise):
    layer = layer_of(name, standardise)
    x, d, plane = operands(layer, stride)
    tables = tied_copies(layer.expansion).to(torch.device(DEVICE))
    exact = conv_gradient.reference(x.double(), d.double(), 2, *plane)  # [n, O, taps, C]
    shape = (len(exact), layer.out_type.size, *plane[0], layer.in_type.size)
    wanted = layer.double().coefficient_gradient(exact.view(shape).movedim(-1, 2))
    layer.float()
    for width in (64, 128):
        blocks = blocks_of(tables, width).to(torch.device(DEVICE))
        raw = conv_copies.reference(x.double(), d.double(), 2, *plane, blocks.columns, blocks.local, width)
        found = conv_copies.conv_copies(
            x, d, 2, *plane, blocks.columns, blocks.local, width, blocks.vector, tuned.Copies(width, 32, 4, 3)
        )
        assert found.dtype == HALF
        close(found, raw, torch.finfo(HALF).eps)
        standard = None
        if standardise:
            standard = jacobian(layer.expansion, layer.weight, layer.eps, blocks.kernels.order)
        g, norms = summed_gradients(x, d, 2, plane, blocks, standard, tuned.Copies(width, 32, 4, 3))
        close(Ordered(g, _order(blocks.kernels), norms).dense(), wanted, 8 * torch.finfo(HALF).eps)
        assert torch.allclose(norms.double(), g.double().square().sum(1), rtol=1e-5)


def test_what_cannot_be_a_block_is_none():
    tables = tied_copies(layer_of("D4, exact").expansion)
    assert blocks_of(tables, 4) is None, "copies exchange entries in eights"
    narrow = tied_copies(SteerableConv2d(trivial_fields(C4, 3), regular_fields(C4, 2), 3).expansion)
    assert blocks_of(narrow, 64) is None, "eight rows do not fill the matrix units"
    assert [conv_copies.fits(*sizes) for sizes in ((4, 4), (3, 4), (4, 3), (1, 8), (1, 256))] == [True, True, False, False, False]


def test_a_wrong_place_is_caught(forced):
    """The broken twin exchanges two places of one copy."""
    layer = layer_of("D4, exact")
    x, d, plane = operands(layer)
    blocks = blocks_of(tied_copies(layer.expansion), 64).to(torch.device(DEVICE))
    local = blocks.local.clone()
    local[3, [0, 1]] = local[3, [1, 0]]
    found = conv_copies.conv_copies(x, d, 2, *plane, blocks.columns, local, 64, blocks.vector, SETTING)
    wanted = conv_copies.reference(x.double(), d.double(), 2, *plane, blocks.columns, blocks.local, 64)
    assert float((found.double() - wanted).norm() / wanted.norm()) > 0.01


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_owner_that_is_not_finite_stays_its_own(forced, value):
    layer = layer_of("D4, exact")
    x, d, plane = operands(layer)
    blocks = blocks_of(tied_copies(layer.expansion), 64).to(torch.device(DEVICE))
    clean, norms = summed_gradients(x, d, 2, plane, blocks, None, SETTING)
    x[3, 0, 0, 0] = value  # a view of owner 1
    g, spoilt = summed_gradients(x, d, 2, plane, blocks, None, SETTING)
    assert not bool(torch.isfinite(spoilt[1]))
    assert torch.equal(g[[0, 2]], clean[[0, 2]])
    assert torch.equal(spoilt[[0, 2]], norms[[0, 2]])


def test_more_owners_than_a_launch_may_have(forced, monkeypatch):
    layer = layer_of("C2")
    x, d, plane = operands(layer, owners=5)
    blocks = blocks_of(tied_copies(layer.expansion), 64).to(torch.device(DEVICE))
    whole, _ = summed_gradients(x, d, 2, plane, blocks, None, SETTING)
    monkeypatch.setattr(conv_copies, "ROWS", 2)
    parts, _ = summed_gradients(x, d, 2, plane, blocks, None, SETTING)
    assert torch.equal(whole, parts)


def recorded(layer: SteerableConv2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients and norms of two views each, by the tape."""
    net = torch.nn.Sequential(layer)
    tape = Tape(dict(net.named_parameters()), "sum")
    attach(net, tape)
    tape.rows = RowMap.regular(len(x) // 2, 2)
    with torch.autocast(DEVICE, HALF):
        out = net(x)
    out.float().square().sum().backward()
    gradients = tape.gradients()
    detach(net)
    return gradients.dense("0.weight").float(), gradients.norms_squared()["0.weight"]


@pytest.mark.parametrize("name", ["D4, exact", "D4, steerable"])
def test_layers_are_added_up_where_that_was_measured_to_be_faster(forced, name, monkeypatch):
    """The tape takes the way that the table names; norms are those of what is kept."""
    layer = layer_of(name, standardise=True)
    x = channels_last(6, layer.in_type.size, 5, 6)
    run, found = conv_copies.conv_copies, {}
    for setting in (None, SETTING):
        asked, ran = [], []
        patched = {"copies": (tuned, lambda *sizes: (asked.append(sizes), setting)[1]),  # noqa: B023
                   "conv_copies": (conv_copies, lambda *given: (ran.append(given), run(*given))[1])}  # fmt: skip  # noqa: B023
        with monkeypatch.context() as patch:
            for called, (where, instead) in patched.items():
                patch.setattr(where, called, instead)
            g, norms = recorded(layer, x)
        assert asked == [(2 * 5 * 6, layer.out_type.size, layer.in_type.size)]
        assert len(ran) == (setting is not None)
        assert torch.allclose(norms.double(), g.double().square().sum(1), rtol=1e-4)
        found[setting] = g
    close(found[SETTING], found[None], 16 * torch.finfo(HALF).eps)


def test_stored_kernel_gradients_end_in_the_order_of_the_blocks():
    """Parts of other kinds (windows of images, few positions) come through the tables of kernel gradients."""
    for name, width in itertools.product(LAYERS, (64, 128)):
        layer = layer_of(name)
        tables = tied_copies(layer.expansion)
        blocks = blocks_of(tables, width)
        kernel = torch.randn(2, layer.out_type.size, layer.kernel_size**2, layer.in_type.size)
        own, _ = coefficient_gradients(kernel, tables, None, fused=False)
        other, _ = coefficient_gradients(kernel, blocks.kernels, None, fused=False)
        place = lambda t, g: torch.empty_like(g).index_copy_(1, _order(t), g)  # noqa: E731
        torch.testing.assert_close(place(tables, own), place(blocks.kernels, other))


def test_tables_of_tiles_must_make_sense():
    good = tuned.Copies(128, 32, 8, 5)
    assert good.sensible()
    for bad in (tuned.Copies(96, 32, 8, 5), tuned.Copies(128, 16, 8, 5), tuned.Copies(128, 32, 16, 5), tuned.Copies(128, 32, 8, 9)):
        assert not bad.sensible()


def test_geometry_and_numpy_agree_on_positions():
    """What the layer asks the table for is what an owner's gradient sums over."""
    layer = layer_of("D4, exact")
    x, d, plane = operands(layer)
    conv = Conv(x, d, 2, (d.shape[1], x.shape[1], *plane[0]), Geometry(*plane, 1))
    assert conv.tokens == 2 * int(np.prod(d.shape[2:]))
