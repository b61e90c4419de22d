"""Block-circulant layers: the dense layer they stand for, and per-sample gradients of the free parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.circulant import CirculantConv2d, CirculantLinear, expand, make_circulant, nearest
from erlangen.circulant.algebra import coordinates, real_bins, scales
from erlangen.gradients import RowMap, Tape, attach, detach
from erlangen.gradients.registry import find_rule
from erlangen.mechanisms.frequency import Fourier
from erlangen.models import make_model
from tests.gradients.reference import assert_same, one_by_one, recorded

shapes = st.tuples(st.integers(1, 11), st.integers(1, 11), st.integers(1, 6))


def by_definition(w: torch.Tensor) -> torch.Tensor:
    """Eq. 18, entry by entry."""
    p, q, b = w.shape
    out = torch.zeros(p * b, q * b, dtype=w.dtype)
    for i in range(p):
        for j in range(q):
            for r in range(b):
                for c in range(b):
                    out[i * b + r, j * b + c] = w[i, j, (c - r) % b]
    return out


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_linear_is_its_dense_matrix(shape):
    inputs, outputs, block = shape
    layer = CirculantLinear(inputs, outputs, block).double()
    torch.testing.assert_close(expand(layer.weight.detach()), by_definition(layer.weight.detach()))
    x = torch.randn(3, 2, inputs, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))
    assert layer.weight.numel() == -(-inputs // block) * -(-outputs // block) * block


@given(shapes, st.sampled_from([(3, 1, 1), (1, 1, 0), (2, 2, 1)]))
@settings(max_examples=40, deadline=None)
def test_convolution_is_its_dense_kernel(shape, kernel):
    inputs, outputs, block = shape
    size, stride, padding = kernel
    layer = CirculantConv2d(inputs, outputs, size, block, stride, padding).double()
    x = torch.randn(2, inputs, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))


@pytest.mark.parametrize("options", [
    {"padding": "same"}, {"padding": 2, "dilation": 2}, {"padding": 1, "padding_mode": "reflect"}, {"bias": False},
])  # fmt: skip
def test_convolution_arguments(options):
    layer = CirculantConv2d(5, 7, 3, 3, **options).double()
    x = torch.randn(2, 5, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))
    assert_same(recorded(layer, (x,)), one_by_one(layer, (x,)))


@given(shapes, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_linear_per_sample_gradients(shape, tokens, rows):
    inputs, outputs, block = shape
    layer = CirculantLinear(inputs, outputs, block).double()
    x = torch.randn(rows, *([tokens] if tokens > 1 else []), inputs, dtype=torch.float64)
    for strategy in ("auto", "materialise", "norms-first"):
        assert_same(recorded(layer, (x,), strategy=strategy), one_by_one(layer, (x,)))


@given(shapes, st.sampled_from([(3, 1, 1), (1, 1, 0), (2, 2, 1)]))
@settings(max_examples=25, deadline=None)
def test_convolution_per_sample_gradients(shape, kernel):
    inputs, outputs, block = shape
    size, stride, padding = kernel
    layer = CirculantConv2d(inputs, outputs, size, block, stride, padding).double()
    x = torch.randn(3, inputs, 4, 5, dtype=torch.float64)
    for strategy in ("auto", "norms-first"):
        assert_same(recorded(layer, (x,), strategy=strategy), one_by_one(layer, (x,)))


@pytest.mark.parametrize("block", range(1, 10))
def test_coordinates_are_the_unitary_spectrum(block):
    """Orthonormal, and DC, Nyquist, √2·Re, √2·Im of torch's transform."""
    x = torch.randn(3, block, dtype=torch.float64)
    matrix, hat = coordinates(block, x), torch.fft.rfft(x, norm="ortho")
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(block, dtype=torch.float64))
    real, middle = real_bins(block), slice(1, (block + 1) // 2)
    pairs = torch.stack([hat.real[:, middle], hat.imag[:, middle]], 2).flatten(1) * math.sqrt(2)
    ends = hat.real[:, [0, -1][:real]]
    torch.testing.assert_close(x @ matrix.T, torch.cat([ends, pairs], 1))
    w_hat = torch.fft.rfft(x)  # what `scales` says of kernels
    entries = torch.cat([w_hat.real[:, [0, -1][:real]], torch.view_as_real(w_hat[:, middle]).flatten(1)], 1)
    torch.testing.assert_close(x @ matrix.T * scales(block, x), entries)


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
@pytest.mark.parametrize(("block", "map_size"), [(1, 5), (2, 4), (4, 3), (4, 16), (5, 4), (8, 6)])
def test_kernels_are_measured_in_their_spectra(block, map_size, strategy):
    """Norms, weighted sums, non-finite owners and the gradients themselves, with two views of every owner."""
    torch.manual_seed(block)
    layer = CirculantConv2d(2 * block, 3 * block, 3, block, padding=1, bias=False).double()
    x = torch.randn(8, 2 * block, map_size, map_size, dtype=torch.float64)
    rows = RowMap.regular(4, 2)
    got = recorded(layer, (x,), strategy=strategy, rows=rows)
    want = one_by_one(layer, (x,))["weight"].unflatten(0, (4, 2)).mean(1)
    norms, weights = got.norms_squared()["weight"], torch.rand(4, dtype=torch.float64)
    torch.testing.assert_close(norms, want.flatten(1).square().sum(1))
    torch.testing.assert_close(got.weighted_sum({"weight": weights})["weight"], torch.einsum("n,n...->...", weights, want))
    torch.testing.assert_close(got.dense("weight"), want)
    bad = torch.tensor([False, True, False, False])
    left = got.without(bad)
    torch.testing.assert_close(left.weighted_sum({"weight": weights})["weight"], torch.einsum("n,n...->...", weights * ~bad, want))
    torch.testing.assert_close(left.norms_squared()["weight"], norms * ~bad)
    # in another geometry than the Euclidean one gradients are formed, a chunk of owners at a time
    metric = torch.rand(layer.weight.shape, dtype=torch.float64)
    again = recorded(layer, (x,), strategy=strategy, rows=rows).norms_squared(lambda _: metric)["weight"]
    torch.testing.assert_close(again, (metric * want).flatten(1).square().sum(1))


def test_chunks_of_owners_cover_all(monkeypatch):
    monkeypatch.setattr("erlangen.gradients.pieces.CHUNK_FLOATS", {"cpu": 600})
    layer = CirculantConv2d(8, 8, 3, 4, padding=1, bias=False).double()
    x = torch.randn(7, 8, 6, 6, dtype=torch.float64)
    want, metric = one_by_one(layer, (x,))["weight"], torch.rand(layer.weight.shape, dtype=torch.float64)
    got = recorded(layer, (x,), strategy="norms-first")
    assert len(got._pieces["weight"].chunks()) > 1
    torch.testing.assert_close(got.norms_squared(lambda _: metric)["weight"], (metric * want).flatten(1).square().sum(1))
    weights = torch.rand(7, dtype=torch.float64)
    torch.testing.assert_close(got.weighted_sum({"weight": weights})["weight"], torch.einsum("n,n...->...", weights, want))


def test_no_kernel_gradient_is_above_its_norm_when_terms_cancel():
    """Two maps of huge entries that nearly cancel: clipped by its norm, what is summed is never longer than the bound."""
    torch.manual_seed(0)
    for strategy in ("auto", "norms-first"):
        for size in (1e2, 1e5, 1e8):
            layer = CirculantConv2d(8, 8, 3, 4, padding=1, bias=False)
            x = torch.randn(4, 8, 3, 3) * size
            x[:, 4:] = -x[:, :4] + torch.randn(4, 4, 3, 3) * 1e-3
            got = recorded(layer, (x,), loss=lambda out: out.sum((1, 2, 3)), strategy=strategy)
            norms = got.norms_squared()["weight"].sqrt()
            for owner in range(4):
                alone = torch.zeros(4)
                alone[owner] = 1 / norms[owner]
                assert float(got.weighted_sum({"weight": alone})["weight"].double().norm()) <= 1 + 4e-6


@pytest.mark.parametrize("seed", [2, 5, 9])
def test_a_record_that_is_not_finite_changes_no_chunks(seed, monkeypatch):
    """DC and the other frequencies are measured in chunks of their own. Huge terms that cancel in the norm were summed in those of
    the other, in another order, once a record was left out: 1.6 bounds."""
    monkeypatch.setattr("erlangen.gradients.pieces.CHUNK_FLOATS", {"cpu": 2000})
    torch.manual_seed(seed)
    layer = CirculantConv2d(6, 18, 2, 6, padding=1, bias=False)
    huge = torch.randn(5, 1, 32) * 10 ** (torch.rand(5, 1, 32) * 4 + 4)
    x = torch.cat([huge, -huge], -1)[..., torch.randperm(64)].expand(5, 6, 64).reshape(5, 6, 8, 8).clone()
    x[2, 0, 0, 0] = math.nan
    got = recorded(layer, (x,), lambda out: out.sum((1, 2, 3)), strategy="norms-first", loss_reduction="sum")
    assert len({len(part.chunks()) for part in got._pieces["weight"]._parts()}) == 2
    weights = got.norms_squared()["weight"].rsqrt()
    left = got.without(weights.isnan())
    for owner in (0, 1, 3, 4):
        alone = torch.zeros(5)
        alone[owner] = weights[owner]
        assert float(left.weighted_sum({"weight": alone})["weight"].double().norm()) <= 1 + 4e-6
    metric = torch.rand(layer.weight.shape)  # measured once more, in another geometry
    assert left.norms_squared(lambda _: metric)["weight"].isfinite().all()
    assert torch.equal(left.norms_squared()["weight"][[0, 1, 3, 4]].rsqrt(), weights[[0, 1, 3, 4]])


FILTERS = {"low-pass": {"ratio": 0.5}, "band": {"masks": {"weight": [False, True, False, False, True]}}}


@pytest.mark.parametrize("strategy", ["auto", "materialise", "norms-first"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", FILTERS)
def test_a_filter_takes_frequencies_away_before_anything_is_multiplied(kind, tokens, strategy):
    """Norms, sums and gradients behind Spectral-DP's filter are those of projected gradients; what it removes is never there."""
    torch.manual_seed(tokens)
    layer = CirculantLinear(20, 15, 5, bias=False).double()
    geometry = Fourier(**FILTERS[kind])
    geometry.bind({"weight": layer.weight.shape})
    by, x = geometry.weight("weight"), torch.randn(4, tokens, 20, dtype=torch.float64)
    want = one_by_one(layer, (x,))["weight"]
    kept = geometry.inverse("weight", geometry.forward("weight", want))
    assert float((want - kept).norm()) > 0.1 * float(kept.norm())
    got = recorded(layer, (x,), strategy=strategy, metric=geometry.weight)
    torch.testing.assert_close(got.dense("weight"), kept)
    norms, weights = got.norms_squared(geometry.weight)["weight"], torch.rand(4, dtype=torch.float64)
    squared = kept.flatten(1).square().sum(1)
    assert bool((norms >= squared * (1 - 1e-12)).all())
    torch.testing.assert_close(norms, squared, rtol=2.5e-4, atol=0.0)  # formed gradients are measured with the guard
    torch.testing.assert_close(got.weighted_sum({"weight": weights})["weight"], torch.einsum("n,n...->...", weights, kept))
    left = got.without(torch.tensor([True, False, False, False]))
    assert float(left.norms_squared(geometry.weight)["weight"][0]) == 0.0
    # in other geometries, too, it is the filtered gradient that is measured
    other = got.norms_squared()["weight"]
    torch.testing.assert_close(other, squared)
    assert by.mask.tolist() == geometry.mask["weight"].tolist()


@pytest.mark.parametrize("size", [1e2, 1e5])
def test_nothing_hides_in_frequencies_that_a_filter_removes(size):
    """Inputs whose blocks alternate, huge: the filter keeps none of it, and so must the sum."""
    torch.manual_seed(0)
    layer, geometry = CirculantLinear(16, 16, 4, bias=False), Fourier(masks={"weight": [True, False, False, False]})
    geometry.bind({"weight": layer.weight.shape})
    x = torch.randn(3, 16)
    x[1] += size * torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat(4)

    def released(rows: list[int]) -> torch.Tensor:
        got = recorded(layer, (x[rows],), lambda out: out.sum(1), strategy="norms-first", metric=geometry.weight)
        weights = {"weight": got.norms_squared(geometry.weight)["weight"].rsqrt()}
        return geometry.forward("weight", got.weighted_sum(weights)["weight"]).double()

    assert float(released([1]).norm()) <= 1 + 1e-5
    assert float((released([0, 1, 2]) - released([0, 2])).norm()) <= 1 + 1e-5


def test_views_padding_and_shared_layers():
    layer = CirculantLinear(5, 4, 2).double()
    model = nn.Sequential(CirculantLinear(4, 5, 3).double(), nn.Tanh(), layer, nn.Linear(4, 5).double(), layer)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert_same(recorded(model, (x,)), one_by_one(model, (x,)))
    each = one_by_one(model, (x,))
    got = recorded(model, (x,), rows=RowMap.regular(3, 2))
    assert_same(got, {n: g.unflatten(0, (3, 2)).mean(1) for n, g in each.items()})
    got = recorded(model, (x,), rows=RowMap.of(torch.tensor([4, -1, 4, 7, -1, 7])))
    assert_same(got, {n: torch.stack([g[[0, 2]].mean(0), g[[3, 5]].mean(0)]) for n, g in each.items()})


def test_a_non_finite_sample_is_found_and_removed():
    layer = CirculantLinear(6, 4, 3)
    x = torch.randn(3, 6)
    x[1, 2] = math.nan
    got = recorded(layer, (x,))
    assert not bool(torch.isfinite(got.norms_squared()["weight"][1]))
    clean = got.without(torch.tensor([False, True, False]))
    weights = {n: torch.ones(3) for n in clean.names}
    assert all(bool(torch.isfinite(t).all()) for t in clean.weighted_sum(weights).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_norms_are_taken_in_float32(dtype):
    layer = CirculantLinear(16, 12, 4).to(dtype)
    x = torch.randn(4, 16).to(dtype)
    got = recorded(layer, (x,))
    norms = got.norms_squared()["weight"]
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, got.dense("weight").float().flatten(1).square().sum(1), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("layer", [CirculantLinear(8, 6, 4), CirculantConv2d(8, 6, 3, 4, padding=1)])
def test_autocast(layer):
    """Close to full precision, and the recorded gradients are those of the layer as it ran."""
    x = torch.randn(3, 8) if isinstance(layer, CirculantLinear) else torch.randn(3, 8, 5, 5)
    want = one_by_one(layer, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), layer.to_dense().float()(x).float(), rtol=0.1, atol=0.1)
        got = recorded(layer, (x,))
    for name, w in want.items():
        assert float((got.dense(name).float() - w).norm() / w.norm()) < 0.05


def test_gram_norms_under_cancellation_are_never_too_small():
    """Huge tokens that cancel: the norm is rounded outwards, so a clip that trusts it lets nothing more through."""
    layer = CirculantLinear(32, 32, 4)
    x = torch.randn(1, 1, 32) * 1e4
    x = torch.cat([x, -x + 1e-3 * torch.randn(1, 1, 32)], 1)
    got = recorded(layer, (x,), loss=lambda out: out.sum((1, 2)), strategy="norms-first")
    true = got.dense("weight").double().square().sum()
    assert float(got.norms_squared()["weight"]) >= 0.9 * float(true)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_conversion_is_the_nearest_circulant(shape):
    """Idempotent on circulant matrices, and orthogonal: the residual has no component along any free parameter."""
    inputs, outputs, block = shape
    dense = nn.Linear(inputs, outputs).double()
    layer = CirculantLinear.from_dense(dense, block)
    again = CirculantLinear.from_dense(layer.to_dense(), block)
    torch.testing.assert_close(again.dense(), layer.dense())
    residual = dense.weight.detach() - layer.dense()
    counts = nearest(torch.ones(outputs, inputs, dtype=torch.float64), block)
    projected = nearest(residual, block) * counts
    assert float(projected.abs().max()) < 1e-12
    torch.testing.assert_close(layer.bias, dense.bias)


def test_block_one_is_the_dense_layer():
    conv = nn.Conv2d(3, 5, 3, padding=1).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(CirculantConv2d.from_dense(conv, 1)(x), conv(x))


def test_replacing_the_layers_of_a_model():
    inner = nn.Sequential(nn.Flatten(), nn.Linear(32, 16))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), inner, nn.Linear(16, 3))
    before = sum(p.numel() for p in model.parameters())
    make_circulant(model, 4, skip=("3",))
    assert isinstance(model[0], CirculantConv2d)
    assert isinstance(model[2][1], CirculantLinear)
    assert isinstance(model[3], nn.Linear)
    assert sum(p.numel() for p in model.parameters()) < before / 2.5
    assert find_rule(model[0]) is not None
    assert model(torch.randn(2, 4, 4, 4)).shape == (2, 3)


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_layer_under_two_names_has_one_twin(fresh):
    model = Shared()
    twin = nearest(model.a.weight.detach(), 4)
    make_circulant(model, 4, skip=("head",), fresh=fresh)
    assert isinstance(model.a, CirculantLinear)
    assert model.a is model.b
    assert torch.equal(model.a.weight, twin) is not fresh
    assert [n for n, _ in model.named_parameters()] == ["a.weight", "a.bias", "head.weight", "head.bias"]


def test_skipping_one_name_of_a_layer_leaves_it():
    model = make_circulant(Shared(), 4, skip=("b",))
    assert type(model.a) is nn.Linear
    assert model.a is model.b
    assert isinstance(model.head, CirculantLinear)


def test_what_was_frozen_stays_frozen():
    """Public layers that fine-tuning leaves alone are neither trained nor noised after conversion, there and back."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["2.bias", "3.weight", "3.bias"]
    for fresh in (False, True):
        twin = make_circulant(copy.deepcopy(model), 2, fresh=fresh)
        assert [name for name, p in twin.named_parameters() if p.requires_grad] == trained
        back = nn.Sequential(twin[0].to_dense(), twin[1], twin[2].to_dense(), twin[3].to_dense())
        assert [name for name, p in back.named_parameters() if p.requires_grad] == trained


def test_tied_parameters_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' and '2.weight' are one parameter.*'2'"):
        make_circulant(model, 2)
    assert type(model[1]) is nn.Linear  # nothing was converted before the refusal
    make_circulant(model, 2, skip=("2",))
    assert isinstance(model[1], CirculantLinear)
    assert model[2].weight is model[0].weight


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv2d(4, 4, 3)])
def test_a_model_that_is_one_layer_has_its_twin_returned(layer):
    assert isinstance(make_circulant(layer, 2), CirculantLinear | CirculantConv2d)
    assert make_circulant(layer, 2, skip=("",)) is layer


@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"padding": "same", "padding_mode": "reflect"}])
def test_one_image_without_a_batch_axis(options):
    layer = CirculantConv2d(3, 5, 3, 2, **options)
    x = torch.randn(3, 7, 7)
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    assert layer(x).shape == layer.to_dense()(x).shape
    tape = Tape(dict(layer.named_parameters()))
    attach(layer, tape)
    try:
        with pytest.raises(ValueError, match="need \\[rows, C, H, W\\]"):  # whose gradient would it be?
            layer(x)
    finally:
        detach(layer)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_torchs_own_transforms_go_through(block):
    """Per-sample gradients by torch.func, a program for any batch, and one graph for the compiler."""
    conv, linear = CirculantConv2d(5, 6, 3, block, padding=1), CirculantLinear(6, 4, block)
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear).double()
    x = torch.randn(3, 5, 6, 6, dtype=torch.float64)

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    want = one_by_one(model, (x,), loss=lambda out: out.square().sum(1))
    for name, g in want.items():
        torch.testing.assert_close(got[name], g)
    sizes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(model, (x,), dynamic_shapes=sizes).module()
    torch.testing.assert_close(program(x[:2]), model(x[:2]))
    assert torch._dynamo.explain(model)(x).graph_count == 1


def test_errors_name_the_cure():
    with pytest.raises(ValueError, match="block_size is 0"):
        CirculantLinear(4, 4, 0)
    with pytest.raises(ValueError, match="groups=2"):
        CirculantConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), 2)


@pytest.mark.parametrize("mechanism", ["iso", "gredp", "spectral", "geodp"])
def test_private_training_of_circulant_layers(mechanism):
    torch.manual_seed(0)
    model = nn.Sequential(CirculantConv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), CirculantLinear(64, 2, 4))
    data = TensorDataset(torch.randn(40, 1, 6, 6), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0, max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert 0 < engine.get_epsilon(1e-5) < math.inf
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_fresh_circulant_layers_have_the_scale_of_ordinary_ones():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(256, 256), nn.Unflatten(1, (64, 2, 2)), nn.Conv2d(64, 64, 3))
    for fresh, scale in ((True, 1.0), (False, 8**-0.5)):
        copied = nn.Sequential(nn.Linear(256, 256), nn.Unflatten(1, (64, 2, 2)), nn.Conv2d(64, 64, 3))
        model = make_circulant(copied, 8, fresh=fresh)
        for k in (0, 2):
            ratio = float(model[k].weight.detach().std() / dense[k].weight.detach().std())
            assert ratio == pytest.approx(scale, rel=0.1)


def test_images_that_are_too_small_are_refused_as_by_dense_layers():
    """Nothing is left of them for the first linear layer; torch builds such a layer, and its convolution says what is wrong."""
    for circulant in (None, 2):
        with pytest.raises(RuntimeError, match="Kernel size"):
            make_model("lenet", (1, 8, 8), 10, circulant=circulant)(torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("strategy", ["auto", "norms-first", "materialise"])
def test_an_empty_batch_goes_through(strategy):
    """Nobody is drawn now and then: a step that fails there would say so."""
    model = nn.Sequential(CirculantConv2d(4, 6, 3, block_size=2), nn.Flatten(), CirculantLinear(54, 3, block_size=3))
    tape = Tape(dict(model.named_parameters()), "sum", strategy)
    attach(model, tape)
    tape.rows = RowMap.regular(0)
    out = model(torch.zeros(0, 4, 5, 5))
    assert out.shape == (0, 3)
    out.sum().backward()
    gradients = tape.gradients()
    assert all(n.shape == (0,) for n in gradients.norms_squared().values())
    totals = gradients.weighted_sum({name: torch.zeros(0) for name in gradients.names})
    assert not any(bool(t.detach().any()) for t in totals.values())
    detach(model)
