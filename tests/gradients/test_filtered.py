"""Kernel gradients behind a filter are what the filter leaves of kernel gradients, however they are measured and added up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from erlangen.gradients import RowMap, Tape, attach, kernels, pieces
from erlangen.gradients.attach import detach
from erlangen.gradients.filtered import KernelFilter, Projected
from erlangen.gradients.kernels import conv_gradient, conv_unformed, filtered_maps
from erlangen.gradients.pieces import Dense, gram_norms, unit_scale
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rules import filtered
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.filtered import FilteredConv, FilteredMaps
from erlangen.mechanisms import GaussianMechanism, StreamNoise
from erlangen.mechanisms.frequency import Fourier
from tests.kernels import DEVICE, HALF, channels_last, close

GEOMETRIES = {
    "plain": Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strides": Geometry((4, 3), (2, 1), (0, 2), (1, 2), 1),
    "line": Geometry((5,), (2,), (1,), (1,), 1),
    "space": Geometry((2, 1, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1),
}
WAYS = ("formed", "measured and formed again", "gram")


def example(geometry: Geometry, outputs: int, owners: int = 5, views: int = 2, dtype: torch.dtype = torch.float32) -> Conv:
    torch.manual_seed(0)
    x = torch.randn(owners * views, 3, *(8, 9, 7)[: len(geometry.kernel)], dtype=dtype)
    g = geometry
    sizes = zip(x.shape[2:], g.kernel, g.stride, g.padding, g.dilation, strict=True)
    out = [(s + 2 * p - e * (k - 1) - 1) // t + 1 for s, k, t, p, e in sizes]
    return Conv(x, torch.randn(len(x), outputs, *out, dtype=dtype), views, (outputs, 3, *g.kernel), g)


def low_pass(shape: tuple[int, ...], ratio: float = 0.5) -> tuple[Fourier, KernelFilter]:
    geometry = Fourier(ratio)
    geometry.bind({"k": torch.Size(shape)})
    by = geometry.weight("k")
    assert isinstance(by, KernelFilter)
    return geometry, by


def taken(conv: Conv, by: KernelFilter, way: str) -> tuple[FilteredConv | Projected, Tensor]:
    piece = conv.filtered(by)
    assert isinstance(piece, FilteredConv)
    if way == "gram":
        return piece, by.outward(piece._gram(), piece.taps)
    if way == "formed":
        piece = piece.formed()
    piece.measured_formed = way != "formed"
    return piece, piece.norms_squared(by)


@pytest.mark.parametrize("outputs", [4, 40])  # filtered when formed; windows filtered
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_norms_sums_and_gradients_are_those_of_what_the_filter_leaves(name, way, outputs, monkeypatch):
    monkeypatch.setattr(filtered, "WINDOW_FLOATS", 256)  # parts of few owners, the last one smaller
    conv = example(GEOMETRIES[name], outputs)
    geometry, by = low_pass(conv.shape)
    kept = geometry.inverse("k", geometry.forward("k", conv.dense().double()))
    assert float((kept - conv.dense().double()).norm()) > 0.1 * float(kept.norm()), "something is filtered out"
    if way == "measured and formed again":
        monkeypatch.setattr(FilteredConv, "prefers_dense", True)
    piece, norms = taken(conv, by, way)
    wanted, w = kept.flatten(1).square().sum(1), torch.rand(5)
    assert bool((norms.double() >= wanted * (1 - 1e-6)).all())
    outward = 1e-3 + 1e-6 * conv.tokens**2 if way == "gram" else 1e-4  # of hundreds of positions nobody would take Gram norms
    torch.testing.assert_close(norms.double(), wanted, rtol=outward, atol=0.0)
    torch.testing.assert_close(piece.dense().double(), kept, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        piece.weighted_sum(w).double(), torch.einsum("n,n...->...", w.double(), kept), rtol=1e-4, atol=1e-4
    )
    bad = torch.tensor([True, False, False, True, False])
    rest = piece.without(bad)
    torch.testing.assert_close(rest.weighted_sum(w), piece.weighted_sum(torch.where(bad, 0.0, w)), rtol=1e-4, atol=1e-4)
    assert float(rest.norms_squared(by)[bad].abs().max()) == 0.0


# -- maps that are filtered, where kernels take 16-bit products ---------------------------------------------------------


@pytest.fixture
def forced(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "FORCED", True)


PLANES = {name: GEOMETRIES[name] for name in ("plain", "strides")}


@pytest.mark.parametrize("name", PLANES)
def test_the_kernel_is_its_twin(forced, name):
    """Also where a program has more channels, more columns or more pixels than there are, and every model its own filter."""
    g = PLANES[name]
    for channels, kept, models in ((3, 5, 1), (70, 2, 2), (16, 9, 3)):
        x = channels_last(2 * models, channels, 8, 9, dtype=HALF)
        columns = torch.randn(models, math.prod(g.kernel), kept, device=DEVICE)
        found = filtered_maps.filtered_maps(x, columns, g.kernel, g.stride, g.padding, g.dilation)
        wanted = filtered_maps.reference(x.double(), columns.double(), g.kernel, g.stride, g.padding, g.dilation)
        assert found.dtype == HALF
        assert found.shape == wanted.shape
        assert found.is_contiguous(memory_format=torch.channels_last)
        close(found, wanted, torch.finfo(HALF).eps)


@pytest.mark.parametrize("outputs", [4, 64])
@pytest.mark.parametrize("way", ["formed", "measured and formed again", "not formed"])
@pytest.mark.parametrize("name", PLANES)
def test_filtered_maps_have_the_norms_and_sums_of_what_the_filter_leaves(forced, name, way, outputs, monkeypatch):
    if way == "not formed":
        monkeypatch.setattr(conv_unformed, "cheaper", lambda *sizes: True)
    monkeypatch.setattr(FilteredMaps, "are_fewer", lambda conv, by: True)
    views = 1 if way == "not formed" else 2  # of few positions
    conv = example(PLANES[name], outputs, views=views, dtype=HALF)
    conv = Conv(*(t.to(DEVICE, memory_format=torch.channels_last) for t in (conv.x, conv.d)), views, conv.shape, conv.geometry)
    geometry, by = low_pass(conv.shape)
    piece = conv.filtered(by)
    assert isinstance(piece, FilteredMaps)
    assert piece.whole is conv
    assert piece.prefers_dense != (way == "not formed")
    exact = Conv(conv.x.double(), conv.d.double(), views, conv.shape, conv.geometry).dense()
    kept = geometry.inverse("k", geometry.forward("k", exact))
    piece = piece.formed() if way == "formed" else piece
    near, w = 8 * torch.finfo(HALF).eps, torch.rand(5, device=DEVICE)
    with exact_float32():
        norms = piece.norms_squared(by)
        torch.testing.assert_close(norms.double(), kept.flatten(1).square().sum(1), rtol=near, atol=0.0)
        close(piece.dense(), kept, near)
        close(piece.weighted_sum(w), torch.einsum("n,n...->...", w.double(), kept), near)
        for k in range(conv.count):  # what is added is never longer than was measured
            added = piece.weighted_sum(torch.eye(conv.count, device=DEVICE)[k])
            assert added.dtype == torch.float32
            assert float(added.double().norm()) <= float(norms[k].sqrt()) * (1 + 1e-6)
        bad = torch.tensor([True, False, False, True, False], device=DEVICE)
        rest = piece.without(bad)
        close(rest.weighted_sum(w), piece.weighted_sum(torch.where(bad, 0.0, w)), 1e-4)
        assert float(rest.norms_squared(by)[bad].abs().max()) == 0.0


def test_gradients_of_large_maps_are_formed_and_filtered(forced, monkeypatch):
    """There filtered maps would have more numbers than gradients. What is kept of these is what is measured and added."""
    monkeypatch.setattr(conv_gradient, "worth_it", lambda *sizes: True)
    conv = example(PLANES["plain"], 40, dtype=HALF)
    conv = Conv(*(t.to(DEVICE, memory_format=torch.channels_last) for t in (conv.x, conv.d)), 2, conv.shape, conv.geometry)
    geometry, by = low_pass(conv.shape)
    whole = conv.filtered(by)
    assert isinstance(whole, FilteredConv)
    assert whole.prefers_dense
    piece = whole.formed()
    assert piece.coordinates.g.dtype == HALF
    exact = Conv(conv.x.double(), conv.d.double(), 2, conv.shape, conv.geometry).dense()
    kept, near = geometry.inverse("k", geometry.forward("k", exact)), 8 * torch.finfo(HALF).eps
    with exact_float32():
        close(piece.dense(), kept, near)
        norms = piece.norms_squared(by)
        for k in range(conv.count):
            added = piece.weighted_sum(torch.eye(conv.count, device=DEVICE)[k])
            assert added.dtype == torch.float32
            close(added, kept[k], near)
            assert float(added.double().norm()) <= float(norms[k].sqrt()) * (1 + 1e-6)


@pytest.mark.parametrize(("outputs", "size", "few"), [(64, 4, True), (64, 16, False), (256, 16, True)])
def test_whichever_has_fewer_numbers_is_stored(outputs, size, few):
    conv = Conv(torch.zeros(2, 8, size, size), torch.zeros(2, outputs, size, size), 1, (outputs, 8, 3, 3), GEOMETRIES["plain"])
    _, by = low_pass(conv.shape)
    maps, gradients = 5 * 8 * size**2, 9 * 8 * outputs
    assert FilteredMaps.are_fewer(conv, by) == few == (maps < gradients)


def test_what_the_filter_removes_cannot_hide_in_filtered_maps(forced):
    """Records of alternating pixels, huge beside the others: what is left of them is clipped to the bound, and added as such."""
    conv = high(no_border(64), 3e4)
    conv = Conv(*(t.to(DEVICE, HALF, memory_format=torch.channels_last) for t in (conv.x, conv.d)), 2, conv.shape, conv.geometry)
    _, by = low_pass(conv.shape)
    piece = conv.filtered(by)
    with exact_float32():
        norms = piece.norms_squared(by).sqrt()
        for k in range(conv.count):
            w = torch.zeros(conv.count, device=DEVICE)
            w[k] = 1.0 / norms[k]
            assert 0.9 < float(piece.weighted_sum(w).double().norm()) <= 1 + 1e-5


def test_other_weights_are_those_of_the_filtered_gradients():
    conv = example(GEOMETRIES["plain"], 40)
    _, by = low_pass(conv.shape)
    for piece in (conv.filtered(by), conv.filtered(by).formed()):
        kept = piece.dense()
        omega = torch.rand(conv.shape)
        for weight, wanted in ((None, kept), (omega, kept * omega), (lambda g: 2 * g, 2 * kept)):
            torch.testing.assert_close(piece.norms_squared(weight), wanted.flatten(1).square().sum(1), rtol=1e-4, atol=1e-4)


def test_what_knows_no_filter_stays_as_it_is():
    conv = example(GEOMETRIES["plain"], 4)
    _, by = low_pass(conv.shape)
    grouped = Conv(conv.x, conv.d[:, :3], 2, (3, 1, 3, 3), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 3))
    empty = Conv(conv.x[:0], conv.d[:0], 2, conv.shape, conv.geometry)
    dense = Dense(conv.dense())
    assert [piece.filtered(by) is piece for piece in (grouped, empty, dense)] == [True, True, True]


def high(conv: Conv, size: float) -> Conv:
    """Images that alternate from pixel to pixel: the filter of 3×3 kernels removes almost all of every window."""
    sign = torch.tensor([1.0, -1.0]).repeat(8)
    board = torch.outer(sign[: conv.x.shape[2]], sign[: conv.x.shape[3]])
    return Conv(size * board.expand_as(conv.x).contiguous(), conv.d, conv.views, conv.shape, conv.geometry)


def no_border(outputs: int) -> Conv:
    return example(Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1), outputs)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e4, 1e9, 1e15])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_added_is_never_longer_than_was_measured(way, size, monkeypatch):
    """Gradients of which the filter leaves little but rounding: each time they are computed it may be another."""
    monkeypatch.setattr(FilteredConv, "prefers_dense", way != "gram")
    conv = high(no_border(40), size)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 0] = True  # constants alone: of a window of nine alternating pixels they keep a ninth
    for masks in (None, {"k": mask}):
        geometry = Fourier(0.5, masks)
        geometry.bind({"k": torch.Size(conv.shape)})
        piece, norms = taken(conv, geometry.weight("k"), way)
        for k in range(conv.count):
            bound = float(norms[k].sqrt())
            for lone in (1.0, 3.0, 1e-6):  # weights change what is rounded, and how
                w = torch.zeros(conv.count)
                w[k] = lone
                assert float(piece.weighted_sum(w).double().norm()) <= lone * bound * (1 + 1e-6)


def test_a_norm_that_forgets_the_whole_window_is_caught():
    """The broken twin of Gram norms measures the rounding that it happens to compute; in the sum it is another."""
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[1, 2] = mask[2, 1] = True  # no constants: of constant images nothing is left but rounding
    geometry, sound, twin = Fourier(0.5, {"k": mask}), 0.0, 0.0
    geometry.bind({"k": torch.Size((40, 16, 3, 3))})
    by = geometry.weight("k")
    for seed in range(10):
        torch.manual_seed(seed)
        x = 1e7 * torch.randn(1, 16, 1, 1).expand(1, 16, 3, 3).contiguous()
        conv = Conv(x, torch.randn(1, 40, 1, 1), 1, (40, 16, 3, 3), Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1))
        piece = FilteredConv(conv, by)
        added = float(piece.weighted_sum(torch.ones(1)).double().norm())
        sound = max(sound, added / float(piece.norms_squared(by).sqrt()))
        (a, of_a), (d, of_d) = unit_scale(conv.x, 1), unit_scale(conv.d, 1)
        scaled = Conv(a, d, 1, conv.shape, conv.geometry)
        _, windows = piece._windows(scaled)
        measured = gram_norms(windows(0, 1).mT, scaled.cotangents().squeeze(1).mT).double().sqrt() * of_a * of_d
        twin = max(twin, added / float(measured))
    assert not piece.prefers_dense
    assert twin > 2
    assert sound < 1e-3


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
def test_nobody_moves_the_sum_of_a_network_by_more_than_the_bound(strategy):
    """Neighbouring batches without noise through layers, tape and mechanism: huge, tiny and non-finite records, those that the
    filter removes, and those of which it leaves all."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 40, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(40, 48, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1), nn.Flatten(), nn.Linear(256, 3),
    )  # fmt: skip
    parameters = dict(net.named_parameters())
    mechanism = GaussianMechanism(0.0, 1.0, Fourier(0.5), StreamNoise(0), "spectral")
    mechanism.bind(parameters)
    tape = Tape(parameters, "sum", strategy)
    tape.metric = mechanism.metric
    others, board = torch.randn(6, 2, 8, 8), torch.tensor([1.0, -1.0]).repeat(4)
    shapes = (torch.randn(2, 8, 8), torch.outer(board, board).expand(2, 8, 8), torch.ones(2, 8, 8))

    def released(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        attach(net, tape)
        tape.next_batch()
        tape.rows = RowMap.regular(len(x))
        (net(x).square().sum(1) * weights).sum().backward()
        with torch.no_grad():
            mechanism.accumulate(tape.gradients())
            out = mechanism.finish(1.0)
        detach(net)
        return out

    seen = set()
    before = released(others, torch.ones(6))
    sizes = (1e20, 1e4, 1.0, 1e-20, 0.0, math.nan, math.inf)
    for shape, size, loud in itertools.product(shapes, sizes, (1.0, 1e12)):
        after = released(torch.cat([(shape * size)[None], others]), torch.tensor([loud, *[1.0] * 6]))
        moved = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in before))
        assert moved <= 1 + 3e-5, (size, loud, moved)
        seen.add(moved > 0.99)
    assert seen == {True, False}, "some are clipped, and some count for nothing"


def test_layers_take_the_way_that_is_cheaper():
    """Small maps with many channels: norms without gradients. Large maps: gradients, of the frequencies that are kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(64, 256, 3, padding=1))
    parameters = dict(net.named_parameters())
    mechanism = GaussianMechanism(1.0, 1.0, Fourier(0.5), StreamNoise(0), "spectral")
    mechanism.bind(parameters)
    tape = Tape(parameters, "sum")
    tape.metric = mechanism.metric
    attach(net, tape)
    net(torch.randn(4, 3, 16, 16)).square().sum().backward()
    found = tape.gradients()._pieces
    assert isinstance(found["0.weight"], Projected)
    assert found["0.weight"].coordinates.g.shape == (4, 64, 3, 5), "five of nine numbers of every kernel"
    assert isinstance(found["3.weight"], FilteredConv)
    detach(net)


def test_sixteen_bits_are_measured_as_they_are_added(monkeypatch):
    for prefers, outputs in itertools.product((True, False), (4, 40)):
        monkeypatch.setattr(FilteredConv, "prefers_dense", prefers)
        conv = example(GEOMETRIES["plain"], outputs, dtype=torch.bfloat16)
        _, by = low_pass(conv.shape)
        for piece in (conv.filtered(by), conv.filtered(by).formed()):
            with exact_float32():
                norms = piece.norms_squared(by)
                for k in range(conv.count):
                    alone = torch.zeros(conv.count)
                    alone[k] = 1.0
                    added = piece.weighted_sum(alone)
                    assert added.dtype == torch.float32
                    assert float(added.double().norm()) <= float(norms[k].sqrt()) * (1 + 1e-6)


def test_parts_of_owners_are_the_whole(monkeypatch):
    conv = example(GEOMETRIES["plain"], 40)
    _, by = low_pass(conv.shape)
    whole = conv.filtered(by).norms_squared(by)
    monkeypatch.setitem(pieces.CHUNK_FLOATS, "cpu", 1)
    torch.testing.assert_close(conv.filtered(by).norms_squared(by), whole)


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
def test_whoever_watches_sees_gradients_before_the_filter(strategy):
    """And what is released does not change for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 40, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(40, 48, 3), nn.Flatten(), nn.Linear(48, 3))
    parameters, x = dict(net.named_parameters()), torch.randn(5, 2, 8, 8)
    mechanism = GaussianMechanism(0.0, 1.0, Fourier(0.5), StreamNoise(0), "spectral")
    mechanism.bind(parameters)
    tape = Tape(parameters, "sum", strategy)
    tape.metric = mechanism.metric
    released, seen = [], []
    for tape.watched in (False, True):
        attach(net, tape)
        tape.next_batch()
        net(x).square().sum().backward()
        with torch.no_grad():
            gradients = tape.gradients()
            seen.append({name: gradients.unfiltered().dense(name) for name in parameters})
            released.append(mechanism.release(gradients, 1.0))
        detach(net)
    plain = Tape(parameters, "sum", "materialise")
    attach(net, plain)
    net(x).square().sum().backward()
    wanted = plain.gradients()
    for name in parameters:
        torch.testing.assert_close(seen[1][name], wanted.dense(name), rtol=1e-4, atol=1e-4)
        assert torch.equal(released[0][name], released[1][name])
    detach(net)
