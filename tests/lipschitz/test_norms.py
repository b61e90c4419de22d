"""Certified norms against explicit operator matrices; estimates that are not bounds must be seen to fail."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.lipschitz import (
    FrobeniusDense,
    OrthogonalConv2d,
    OrthogonalDense,
    Projector,
    Sequential,
    SpectralConv2d,
    SpectralDense,
)
from erlangen.lipschitz.base import MARGIN
from erlangen.lipschitz.norms import (
    certified,
    conv_norm,
    dense_norm,
    dense_symbols,
    gram_iteration,
    overlap,
    polyphase,
)


def iterated(w):
    """The bound of the Gram iteration alone, without the margin."""
    (value,), (factor,) = gram_iteration([w])
    return float(value) * factor


def operator(weight, stride, padding, size):
    """The convolution as a matrix [outputs, inputs]."""
    channels = weight.shape[1]
    units = torch.eye(channels * size[0] * size[1], dtype=weight.dtype).view(-1, channels, *size)
    return F.conv2d(units, weight, stride=stride, padding=padding).flatten(1).T


def spectral(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_dense_norms_are_tight_upper_bounds(rows, columns, seed):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    true = spectral(w.double())
    assert true <= float(dense_norm(w)) <= true * MARGIN * min(rows, columns) ** (2.0**-9) * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("shape", [(7, 90), (40, 40), (120, 30), (128, 128), (129, 140), (3, 5000)])
@pytest.mark.parametrize("kind", ["random", "orthogonal", "one large", "ill-conditioned", "complex"])
def test_single_precision_iteration_bounds_and_loses_little(shape, kind):
    """Below 128 rows the squarings run in float32: what their rounding can hide is added."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if kind == "complex":
        w = torch.complex(w, torch.randn(*shape, generator=generator, dtype=torch.float64)).to(torch.complex64)
    u, s, vh = torch.linalg.svd(w.to(torch.complex128) if w.is_complex() else w, full_matrices=False)
    if kind == "orthogonal":
        w = u @ vh
    elif kind == "one large":
        w = u[:, :1] @ vh[:1] + 1e-3 * w
    elif kind == "ill-conditioned":
        w = u @ torch.diag(torch.logspace(0, -12, len(s), dtype=torch.float64)) @ vh
    true = spectral(w.to(torch.complex128) if w.is_complex() else w)
    bound = iterated(w)
    assert true <= bound <= true * 1.012


def test_ranks_share_the_iteration_and_keep_their_own_bounds():
    generator = torch.Generator().manual_seed(0)
    weights = [
        scale * torch.randn(6, n, generator=generator) for scale, n in ((1.0, 6), (100.0, 9), (1e-3, 6), (1.0, 4))
    ]
    together = certified([dense_symbols(w) for w in weights])
    for w, bound in zip(weights, together, strict=True):
        assert float(bound) == pytest.approx(float(dense_norm(w)), rel=1e-3)
        assert spectral(w.double()) <= float(bound)


@pytest.mark.parametrize("value", [0.0, 1e-25, 1e-6, 1e25, math.nan, math.inf])
def test_extreme_weights_are_bounded_or_refused(value):
    for bound, true in (
        (dense_norm(torch.full((3, 4), value)), value * math.sqrt(12)),
        (conv_norm(torch.full((3, 4, 3, 3), value), (1, 1), (4, 4)), value * math.sqrt(12)),
    ):
        assert float(bound) >= true if value <= 1e-6 else not float(bound) < true  # not finite: the weight becomes zero


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_certificates_do_not_depend_on_the_precision_of_products(setting):
    w = torch.randn(60, 60, generator=torch.Generator().manual_seed(0))
    exact, before = dense_norm(w), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(dense_norm(w), exact)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2),
    st.integers(0, 2), st.integers(5, 9), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_conv_norms_bound_the_operator(cin, cout, kh, kw, sh, sw, pad, n, capped, seed):
    dtype = torch.float64 if seed % 2 else torch.float32
    w = torch.randn(cout, cin, kh, kw, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    matrix = operator(w.double(), (sh, sw), pad, (n, n + 1))
    outputs = ((n + 2 * pad - kh) // sh + 1, (n + 1 + 2 * pad - kw) // sw + 1)
    bound = float(conv_norm(w, (sh, sw), outputs, cap=4 if capped else 64))
    assert spectral(matrix) <= bound
    assert spectral(matrix) <= float(conv_norm(w, (sh, sw), None))


def test_conv_norm_is_tight_on_a_large_image():
    w = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true = spectral(operator(w, 1, 1, (16, 16)))
    assert 0.97 < true / float(conv_norm(w, (1, 1), (16, 16), cap=64)) <= 1
    assert 0.93 < true / float(conv_norm(w, (1, 1), (16, 16))) <= 1


def test_the_image_sized_grid_is_not_a_bound():
    """The popular choice, frequencies of the n-point grid, misses the worst frequency of a zero-padded convolution."""
    worst = 1.0
    for seed in range(20):
        w = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        symbols = torch.fft.fft2(w, s=(4, 4)).permute(2, 3, 0, 1)
        on_n_points = float(torch.linalg.matrix_norm(symbols, 2).max())
        worst = min(worst, on_n_points / float(conv_norm(w, (1, 1), None, cap=256)))
        # the coarse grid is a bound once it is paid for
        assert on_n_points / math.cos(math.pi / 4) ** 2 >= float(conv_norm(w, (1, 1), None, cap=256)) / MARGIN
    assert worst < 0.97


def test_power_iteration_is_not_a_bound():
    generator = torch.Generator().manual_seed(0)
    w = torch.diag(torch.tensor([1.0, 0.99, 0.98, 0.97], dtype=torch.float64))
    v = torch.randn(4, generator=generator, dtype=torch.float64)
    for _ in range(5):
        v = w.T @ (w @ v)
        v = v / v.norm()
    assert float((w @ v).norm()) < 1.0 <= iterated(w)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_polyphase_is_the_same_convolution(kernel, stride, seed):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(2, 3, kernel, kernel, generator=generator, dtype=torch.float64)
    taps = math.ceil(kernel / stride)
    blocks = taps + 2
    x = torch.randn(1, 3, blocks * stride, blocks * stride, generator=generator, dtype=torch.float64)
    split = x.view(1, 3, blocks, stride, blocks, stride).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    padded = F.pad(w, (0, taps * stride - kernel) * 2)
    assert torch.allclose(F.conv2d(split, polyphase(w, (stride, stride))), F.conv2d(x, padded, stride=stride))


def test_overlap_counts_windows():
    assert overlap((3, 3), (1, 1)) == 9
    assert overlap((3, 5), (2, 2)) == 2 * 3
    assert overlap((3, 3), (1, 1), (2, 1)) == 2


@pytest.mark.parametrize("every", [1, 3])
def test_projection_keeps_every_norm_below_its_limit(every):
    torch.manual_seed(0)
    conv = SpectralConv2d(2, 4, 3, bias=True, bias_bound=0.5)
    net = Sequential(conv, SpectralDense(5, 7, lipschitz=0.8), OrthogonalDense(6, 4))
    project = Projector(net, every)
    for _ in range(7):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.3 * torch.randn_like(p))
        project()
        assert spectral(operator(net[0].weight.detach().double(), 1, 1, (12, 12))) <= 1.0
        assert float(net[0].bias.detach().double().norm()) <= 0.5
        assert spectral(net[1].weight.detach().double()) <= 0.8
        assert spectral(net[2].weight.detach().double()) <= 1.0


def test_between_certifications_the_bound_is_an_upper_bound():
    torch.manual_seed(0)
    net = Sequential(SpectralConv2d(2, 3, 3))
    project = Projector(net, 100)
    project()
    with torch.no_grad():
        net[0].weight.add_(0.05 * torch.randn_like(net[0].weight))
    assert float(project.between()[0]) >= spectral(operator(net[0].weight.detach().double(), 1, 1, (12, 12)))


def test_weights_that_are_not_finite_become_zero():
    layer = SpectralDense(3, 3)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    layer.project()
    assert torch.equal(layer.weight, torch.zeros(3, 3))


def test_orthogonal_layers_preserve_norms():
    torch.manual_seed(0)
    for method in ("polar", "bjorck"):
        dense = OrthogonalDense(6, 6, method=method)
        with torch.no_grad():
            dense.weight.add_(0.2 * torch.randn_like(dense.weight))
        dense.project()
        x = torch.randn(5, 6)
        assert torch.allclose(dense(x).norm(dim=1), x.norm(dim=1), rtol=1e-3)
    patches = OrthogonalConv2d(2, 8, 2, 2, padding=0)
    with torch.no_grad():
        patches.weight.add_(0.2 * torch.randn_like(patches.weight))
    patches.project()
    x = torch.randn(5, 2, 8, 8)
    assert torch.allclose(patches(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-3)


def test_nearly_orthogonal_convolutions_lose_little_and_stay_certified():
    torch.manual_seed(0)
    plain, near = SpectralConv2d(4, 4, 3), OrthogonalConv2d(4, 4, 3, sweeps=20)
    with torch.no_grad():
        noise = 0.1 * torch.randn_like(plain.weight)
        plain.weight.add_(noise)
        near.weight.add_(noise)
    plain.project()
    near.project()
    least = [float(torch.linalg.svdvals(operator(m.weight.detach().double(), 1, 1, (8, 8)))[-1]) for m in (plain, near)]
    assert spectral(operator(near.weight.detach().double(), 1, 1, (8, 8))) <= 1.0
    assert least[1] > least[0]


def test_layers_projected_together_are_projected_as_alone():
    torch.manual_seed(0)
    net = Sequential(
        SpectralConv2d(2, 4, 3, bias=True),
        SpectralDense(5, 7, lipschitz=0.8),
        FrobeniusDense(6, 3),
        SpectralDense(30, 40),
    )
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    alone = copy.deepcopy(net)
    alone.project()
    Projector(net)()
    for a, b in zip(alone.parameters(), net.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=2e-3)


def test_a_new_limit_is_kept_at_once():
    """What is held in memory for the next call belongs to one limit and one place of the weights."""
    torch.manual_seed(0)
    net = Sequential(SpectralDense(6, 6))
    project = Projector(net, 10)
    project()
    project()
    net[0].lipschitz = 0.25
    project()
    assert spectral(net[0].weight.detach().double()) <= 0.25
    net[0].weight = torch.nn.Parameter(5 * torch.randn(6, 6))
    project.ensure()
    assert spectral(net[0].weight.detach().double()) <= 0.25


def test_a_layer_that_certifies_itself_is_asked_itself():
    """Shared certification may not use inherited symbols where a subclass says that its norm is another."""
    from erlangen.lipschitz.projection import _symbols

    class Doubled(SpectralDense):
        def certified_norm(self):
            return 2 * super().certified_norm()

    class Told(Doubled):
        def symbols(self):
            return super().symbols()

    layer = SpectralDense(4, 3)
    assert _symbols(layer) is not None
    assert _symbols(Doubled(4, 3)) is None
    assert _symbols(Told(4, 3)) is not None
