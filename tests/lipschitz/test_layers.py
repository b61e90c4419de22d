"""Every layer under attack: no ratio above 1, at least 0.9 where the bound is tight, and wrong bounds are caught."""

from __future__ import annotations

import math

import pytest
import torch

from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    AvgPool2d,
    BackwardClip,
    Bias,
    BoundedInput,
    Flatten,
    FrobeniusDense,
    FullSort,
    GlobalAvgPool,
    GroupSort,
    Householder,
    InvertibleDownsampling,
    L2NormPool2d,
    LayerCentering,
    LipschitzLayer,
    MaxMin,
    MaxPool2d,
    MulticlassHinge,
    OrthogonalConv2d,
    OrthogonalDense,
    Permute,
    ReLU,
    Residual,
    SensitivityError,
    Sequential,
    SpectralConv2d,
    SpectralDense,
    TokenMean,
    Tokens,
    check_layer,
    check_sensitivity,
)
from erlangen.lipschitz import shape as shapes
from erlangen.lipschitz.base import Activation

TIGHT = {
    "dense": (lambda: SpectralDense(8, 5, bias=True), (8,)),
    "tokens": (lambda: SpectralDense(8, 5, bias=True), (6, 8)),
    "frobenius": (lambda: FrobeniusDense(8, 5), (8,)),
    "orthogonal": (lambda: OrthogonalDense(8, 5), (8,)),
    "conv": (lambda: SpectralConv2d(3, 8, 3, bias=True), (3, 12, 12)),
    "conv-stride": (lambda: SpectralConv2d(3, 8, 3, stride=2), (3, 12, 12)),
    "patches": (lambda: OrthogonalConv2d(4, 16, 2, 2, padding=0), (4, 8, 8)),
    "relu": (ReLU, (4, 4)),
    "groupsort": (lambda: GroupSort(4), (8, 4, 4)),
    "maxmin": (lambda: MaxMin(-1), (3, 8)),
    "fullsort": (FullSort, (8,)),
    "householder": (lambda: Householder(8), (8, 3, 3)),
    "maxpool": (lambda: MaxPool2d(2), (3, 8, 8)),
    "maxpool-overlap": (lambda: MaxPool2d(3, 2), (3, 9, 9)),
    "avgpool": (lambda: AvgPool2d(2), (3, 8, 8)),
    "avgpool-overlap": (lambda: AvgPool2d(3, 2), (3, 9, 9)),
    "avgpool-scaled": (lambda: AvgPool2d(2, scaled=True), (3, 8, 8)),
    "l2pool": (lambda: L2NormPool2d(2), (3, 8, 8)),
    "global": (GlobalAvgPool, (3, 6, 6)),
    "global-scaled": (lambda: GlobalAvgPool(scaled=True), (3, 6, 6)),
    "token-mean": (TokenMean, (5, 4)),
    "centering": (LayerCentering, (3, 4, 4)),
    "centering-channel": (lambda: LayerCentering(True), (3, 4, 4)),
    "bias-map": (lambda: Bias(3), (3, 5, 5)),
    "bias-token": (lambda: Bias(4, dim=-1), (6, 4)),
    "downsample": (InvertibleDownsampling, (3, 4, 4)),
    "flatten": (Flatten, (3, 4)),
    "permute": (lambda: Permute(2, 1), (3, 4)),
    "to-tokens": (Tokens, (3, 4, 4)),
    "residual": (lambda: Residual(SpectralDense(6, 6), average=False), (6,)),
    "residual-average": (lambda: Residual(SpectralDense(6, 6), MaxMin(-1)), (6,)),
    "clip": (lambda: BackwardClip(0.3), (6,)),
    "clip-adaptive": (lambda: AdaptiveBackwardClip(0.3), (6,)),
}
LOOSE = {
    "conv-valid": (lambda: SpectralConv2d(2, 4, 5, padding=0, bias=True), (2, 9, 9)),
    "conv-even": (lambda: SpectralConv2d(2, 4, (2, 4), stride=(1, 3), padding=1), (2, 7, 9)),
    "conv-tiny": (lambda: SpectralConv2d(2, 4, 3), (2, 2, 2)),
    "conv-near-orthogonal": (lambda: OrthogonalConv2d(4, 4, 3), (4, 6, 6)),
    "l2pool-overlap": (lambda: L2NormPool2d(3, 1), (2, 6, 6)),
    "deep": (lambda: Sequential(SpectralConv2d(1, 4, 3), MaxMin(), Flatten(), SpectralDense(64, 3)), (1, 4, 4)),
}


@pytest.mark.parametrize("name", [*TIGHT, *LOOSE])
def test_search_never_beats_a_bound_and_reaches_the_tight_ones(name):
    torch.manual_seed(0)
    make, shape = (TIGHT | LOOSE)[name]
    report = check_layer(make(), shape, norm=2.0, cotangent=1.5, steps=20)
    assert report.worst <= 1.0
    if name in TIGHT:
        assert min(report.ratios.values()) >= 0.9, str(report)


# -- wrong bounds that were published, one twin each ------------------------------------------------------------------


class BiasWithoutPositions(Bias):
    """A bias on a feature map bounded as if it were added once."""

    def parameter_bound(self, x, g):
        return {"bias": g}


class ConvBiasWithoutPositions(SpectralConv2d):
    def parameter_bound(self, x, g):
        return super().parameter_bound(x, g) | {"bias": g}


class ConvCoefficientTwice(SpectralConv2d):
    """The factor between kernel and operator norm enters the projection a second time."""

    def project(self):
        super().project()
        with torch.no_grad():
            self.weight.mul_(self.frobenius_factor())


class ConvKernelWithoutOverlap(SpectralConv2d):
    """The kernel's gradient bounded by G·X, as if no pixel were in two windows."""

    def parameter_bound(self, x, g):
        return {"weight": g * x.norm}


class OverlappingMaxPool(MaxPool2d):
    """Overlapping windows said to be 1-Lipschitz."""

    def jacobian_bound(self, x):
        return 1.0


class SumResidual(Residual):
    """x + f(x) said to be 1-Lipschitz."""

    def backpropagate_cotangent(self, x, g):
        return g


class ClipThatDoesNot(BackwardClip):
    """Says min(G, c) and lets everything through."""

    def cut(self, cotangent, rows):
        return cotangent


class BatchCentering(LipschitzLayer):
    """Centred over the batch axis: one sample moves the others."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


WRONG = {
    "bias": (lambda: BiasWithoutPositions(3), (3, 5, 5)),
    "conv-bias": (lambda: ConvBiasWithoutPositions(2, 3, 3, bias=True), (2, 6, 6)),
    "conv-twice": (lambda: ConvCoefficientTwice(2, 3, 3), (2, 8, 8)),
    "conv-kernel": (lambda: ConvKernelWithoutOverlap(2, 3, 3), (2, 8, 8)),
    "maxpool": (lambda: OverlappingMaxPool(3, 1), (2, 6, 6)),
    "residual": (lambda: SumResidual(SpectralDense(6, 6), average=False), (6,)),
    "clip": (lambda: ClipThatDoesNot(0.1), (6,)),
    "batch": (BatchCentering, (6,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bounds_are_caught(name):
    torch.manual_seed(0)
    make, shape = WRONG[name]
    with pytest.raises(SensitivityError):
        check_layer(make(), shape, norm=2.0, cotangent=1.5, steps=20)


# -- the input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ball", "sphere"])
@pytest.mark.parametrize("colour", ["rgb", "hsv", "yiq", "yuv", "grayscale"])
def test_whatever_comes_in_leaves_bounded_and_finite(mode, colour):
    layer = BoundedInput((3, 4, 4), 5.0, mode, colour)
    rows = [torch.full((3, 4, 4), v) for v in (0.0, 1e-42, 0.3, 3e38, -1e30, math.nan, math.inf, -math.inf)]
    mixed = torch.rand(3, 4, 4)
    mixed[0, 0, 0], mixed[1, 0, 0], mixed[2, 1, 1] = math.nan, math.inf, 1e38
    out = layer(torch.stack([*rows, mixed, torch.rand(3, 4, 4)]))
    assert bool(out.isfinite().all())
    assert float(out.double().flatten(1).norm(dim=1).max()) <= 5.0
    assert tuple(out.shape[1:]) == layer.propagate_input(Activation((), math.inf)).shape
    assert layer(torch.zeros(0, 3, 4, 4)).shape[0] == 0


def test_the_ball_leaves_small_inputs_alone_and_the_sphere_does_not():
    x = torch.rand(4, 3, 4, 4)
    assert torch.allclose(BoundedInput((3, 4, 4), 100.0)(x), x, rtol=1e-6)
    norms = BoundedInput((3, 4, 4), 7.0, "sphere")(x).flatten(1).norm(dim=1)
    assert torch.allclose(norms, torch.full((4,), 7.0), rtol=1e-4)


def test_colours_agree_with_their_definitions():
    import colorsys

    from erlangen.lipschitz.inputs import converted

    x = torch.rand(5, 3, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.tensor([colorsys.rgb_to_hsv(*row.flatten().tolist()) for row in x], dtype=torch.float64)
    assert torch.allclose(converted(x, "hsv")[:, :, 0, 0], expected)
    grey = torch.full((1, 3, 1, 1), 0.5, dtype=torch.float64)
    for space in ("yiq", "yuv"):
        expected = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
        assert torch.allclose(converted(grey, space).flatten(), expected, atol=1e-3)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="built and bounded for"):
        BoundedInput((3, 4, 4), 1.0)(torch.zeros(2, 3, 5, 5))


def test_maxmin_is_a_sorted_pair_and_householder_starts_there():
    x = torch.randn(4, 6, 2)
    assert torch.equal(MaxMin()(x), x.view(4, 3, 2, 2).sort(2, descending=True).values.flatten(1, 2))
    y = Householder(6)(x)
    first, second = x.chunk(2, 1)
    assert torch.allclose(y, torch.cat((torch.maximum(first, second), torch.minimum(first, second)), 1), atol=1e-6)


def test_flat_l2_pool_has_a_finite_gradient_at_zero():
    x = torch.zeros(1, 1, 4, 4, requires_grad=True)
    L2NormPool2d(2)(x).sum().backward()
    assert bool(x.grad.isfinite().all())


def test_bias_positions():
    assert shapes.Bias(3).positions(Activation((3, 4, 5), 1.0)) == 20
    with pytest.raises(ValueError, match="cannot be added"):
        shapes.Bias(3).positions(Activation((4, 5), 1.0))


# -- centred and scaled inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("colour", ["rgb", "yuv", "grayscale"])
def test_centred_and_scaled_inputs_are_bounded_and_lipschitz(colour):
    layer = BoundedInput((3, 5, 5), 1.0, colour=colour, centre=True, scale=0.3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 5, 5, generator=generator) * torch.logspace(-3, 3, 64).view(-1, 1, 1, 1)
    y = x + 0.1 * torch.randn(x.shape, generator=generator)
    assert float(layer(x).flatten(1).norm(dim=1).max()) <= 1.0
    assert float(layer(x).mean((2, 3)).abs().max()) < 1e-5
    constant = layer.jacobian_bound(Activation((), math.inf))
    ratio = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert float(ratio.max()) <= constant * (1 + 1e-4)
    assert float(ratio[:8].max()) >= 0.5 * constant, "small inputs are only scaled"
    for value in (math.nan, math.inf, -3e38, 3e38):
        x[0, 0] = value
        assert bool(layer(x).isfinite().all())
        assert float(layer(x).flatten(1).norm(dim=1).max()) <= 1.0


def test_the_search_reaches_the_sphere_of_scaled_inputs():
    torch.manual_seed(0)
    net = Sequential(BoundedInput((1, 3, 3), 2.0, centre=True, scale=0.05), Flatten(), OrthogonalDense(9, 9))
    report = check_sensitivity(net, MulticlassHinge(margin=50.0), steps=6, restarts=3)
    assert 0.9 <= report.worst <= 1.0


def test_inputs_without_positions_cannot_be_centred():
    with pytest.raises(ValueError, match="no positions"):
        BoundedInput((4,), 1.0, centre=True)
    with pytest.raises(ValueError, match="scale"):
        BoundedInput((4,), 1.0, scale=0.0)
