"""Whole networks: Algorithm 1 against search and closed forms, low precision, certified radii, refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    BackwardClip,
    BoundedInput,
    CrossEntropy,
    Flatten,
    Householder,
    LipschitzLayer,
    MaxMin,
    MulticlassHinge,
    OrthogonalDense,
    Residual,
    SensitivityError,
    Sequential,
    SpectralConv2d,
    SpectralDense,
    backpropagate_bounds,
    certified_radius,
    check_sensitivity,
    is_certifiable,
    lipschitz_constant,
    output,
)
from erlangen.lipschitz.audit import audit_network, networks
from erlangen.lipschitz.base import MARGIN
from erlangen.models.lipschitz import lipschitz_vgg

SMALL = networks()


def test_algorithm_one_in_closed_form():
    net = Sequential(
        BoundedInput((2, 6, 6), 3.0),
        SpectralConv2d(2, 4, 3, bias=True, lipschitz=0.5, bias_bound=0.1),
        MaxMin(),
        Residual(SpectralConv2d(4, 4, 1), average=False),
        Flatten(),
        SpectralDense(144, 5, lipschitz=2.0),
    )
    bounds, length = backpropagate_bounds(net, 1.5), 1.5
    after_conv = 0.5 * 3.0 + 6 * 0.1
    expected = {
        "1.weight": length * 2 * 2 * 3 * 3.0,
        "1.bias": length * 2 * 2 * 6,
        "3.body.0.weight": length * 2 * after_conv,
        "5.weight": length * 2 * after_conv,
    }
    assert {k: v / MARGIN for k, v in bounds.items()} == pytest.approx(expected)
    assert bounds.total == pytest.approx(MARGIN * math.sqrt(sum(v**2 for v in expected.values())))
    assert output(net).norm == pytest.approx(2 * 2 * after_conv)
    table = str(bounds)
    assert "SpectralConv2d" in table
    assert "3.body.0.weight" in table


@pytest.mark.parametrize("depth", [1, 6])
@pytest.mark.parametrize("k", [0.5, 1.0, 2.0])
def test_theorem_one_regimes(k, depth):
    """Layers of constant K: Δ_d = L·K^(D−1)·X₀ for every layer."""
    body = [SpectralDense(8, 8, lipschitz=k) for _ in range(depth)]
    bounds = backpropagate_bounds(Sequential(BoundedInput((8,), 3.0), *body), 1.0)
    assert list(bounds.values()) == pytest.approx([MARGIN * 3.0 * k ** (depth - 1)] * depth)


def test_the_bound_is_reached_by_a_gradient_norm_preserving_network():
    torch.manual_seed(0)
    net = Sequential(BoundedInput((8,), 2.0), OrthogonalDense(8, 8), MaxMin(-1), OrthogonalDense(8, 8))
    report = check_sensitivity(net, MulticlassHinge(margin=50.0), steps=5, restarts=3)
    assert min(report.ratios.values()) >= 0.99
    assert report.worst <= 1.0


@pytest.mark.parametrize("name", SMALL)
def test_models_withstand_the_search(name):
    torch.manual_seed(0)
    report = check_sensitivity(SMALL[name](), CrossEntropy(20.0), steps=6, restarts=4, move_weights=True)
    assert 0.0 < report.worst <= 1.0


def test_models_have_the_sizes_they_say():
    sizes = [sum(p.numel() for p in lipschitz_vgg(size=size).parameters()) for size in ("small", "medium", "large")]
    assert sizes == pytest.approx([130e3, 500e3, 2e6], rel=0.02)


class Optimist(SpectralDense):
    """Forgets that the input can be as long as X."""

    def parameter_bound(self, x, g):
        return {"weight": 0.5 * g * x.norm}


def test_one_wrong_bound_in_a_network_is_caught():
    torch.manual_seed(0)
    net = Sequential(BoundedInput((8,), 2.0), OrthogonalDense(8, 8), MaxMin(-1), Optimist(8, 4))
    with pytest.raises(SensitivityError, match=r"3\.weight"):
        check_sensitivity(net, MulticlassHinge(margin=50.0), steps=5, restarts=3)


def test_clipping_layers_lower_the_bounds_and_hold():
    torch.manual_seed(0)
    for clip in (BackwardClip(0.2), AdaptiveBackwardClip(0.2)):
        net = Sequential(BoundedInput((6,), 2.0), OrthogonalDense(6, 6), MaxMin(-1), OrthogonalDense(6, 4), clip)
        bounds = backpropagate_bounds(net, math.sqrt(2))
        assert list(bounds.values()) == pytest.approx([0.4 * MARGIN] * 2)
        assert check_sensitivity(net, CrossEntropy(5.0), steps=8).worst >= 0.9
        assert lipschitz_constant(net) == pytest.approx(1.0, rel=1e-3)


def test_a_shared_layer_pays_for_every_use():
    shared = SpectralDense(6, 6)
    net = Sequential(BoundedInput((6,), 2.0), shared, MaxMin(-1), shared)
    assert backpropagate_bounds(net, 1.0)["1.weight"] == pytest.approx(2 * 2.0 * MARGIN)
    check_sensitivity(net, CrossEntropy(5.0), steps=5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bounds_hold_in_the_precision_they_were_made_for(precision):
    """Norm-preserving layers leave no slack but the margins: rounding must fit into them."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (OrthogonalDense(16, 16), MaxMin(-1))]
    net = Sequential(BoundedInput((16,), 2.0, "sphere"), *layers)
    net.project()
    bounds = backpropagate_bounds(net, 1.0, precision)
    worst = 0.0
    for seed in range(40):
        x, c = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            y = net(x)
        net.zero_grad()
        y.backward((c / c.norm()).to(y.dtype))
        found = [float(p.grad.double().norm()) / bounds[n] for n, p in net.named_parameters()]
        worst = max(worst, *found)
    assert worst <= 1.0
    assert worst >= (0.99 if precision == "fp32" else 0.8)


def attacked(net, x, radius, steps=40):
    """Projected gradient ascent on (second logit − first), never further than ``radius`` from x."""
    first, second = net(x).topk(2).indices.split(1, 1)
    delta = torch.randn_like(x)
    size = lambda d: d.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, *[1] * (x.ndim - 1))  # noqa: E731
    reach = radius.to(x.dtype).view(-1, *[1] * (x.ndim - 1)) * 0.999999
    delta = delta / size(delta) * reach
    for k in range(steps):
        delta = delta.detach().requires_grad_()
        logits = net(x + delta)
        (logits.gather(1, second) - logits.gather(1, first)).sum().backward()
        delta = delta.detach() + delta.grad / size(delta.grad) * reach * (2.0 / (1 + k))
        delta = delta * (reach / size(delta)).clamp(max=1.0)
    return x + delta


@pytest.mark.parametrize("name", ["lenet", "vgg", "mixer"])
def test_certified_radius_withstands_an_attack(name):
    torch.manual_seed(0)
    net = SMALL[name]()
    x = torch.rand(24, *net[0].shape) * 0.1
    with torch.no_grad():
        logits = net(x)
    radius = certified_radius(net, logits)
    top = logits.topk(2).values.double()
    expected = (top[:, 0] - top[:, 1]) / (math.sqrt(2) * lipschitz_constant(net))
    assert torch.allclose(radius, expected, rtol=1e-2, atol=1e-5)
    assert torch.equal(net(attacked(net, x, radius)).argmax(1), logits.argmax(1))


def test_the_attack_on_radii_has_teeth():
    """Where the bound is tight it breaks a radius that is 5 % too large."""
    torch.manual_seed(0)
    net = Sequential(BoundedInput((8,), 50.0), OrthogonalDense(8, 8), OrthogonalDense(8, 8))
    x = torch.randn(32, 8)
    radius, before = certified_radius(net, net(x)), net(x).argmax(1)
    assert torch.equal(net(attacked(net, x, radius)).argmax(1), before)
    assert (net(attacked(net, x, 1.05 * radius)).argmax(1) != before).float().mean() > 0.9


def test_no_certificate_means_radius_zero():
    sphere = Sequential(BoundedInput((4,), 1.0, "sphere"), SpectralDense(4, 3))
    assert float(certified_radius(sphere, sphere(torch.randn(2, 4))).max()) == 0.0
    odd = torch.tensor([[1.0, 1.0, 0.0], [math.nan, 2.0, 1.0], [math.inf, 0.0, 0.0], [3.0, 1.0, 1.0]])
    assert certified_radius(1.0, odd).tolist() == [0.0, 0.0, 0.0, pytest.approx(math.sqrt(2), rel=1e-4)]
    with pytest.raises(ValueError, match="two classes"):
        certified_radius(1.0, torch.zeros(3, 1))
    assert [is_certifiable(m) for m in (SMALL["lenet"](), sphere, nn.Linear(2, 2), Sequential())] == [
        True, False, False, False,
    ]  # fmt: skip


# -- refusals ---------------------------------------------------------------------------------------------------------


class Scale(LipschitzLayer):
    """A parameter without a bound."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def test_networks_without_bounds_are_refused():
    with pytest.raises(TypeError, match="nobody knows its bounds"):
        Sequential(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="needs a Lipschitz network"):
        backpropagate_bounds(nn.Linear(3, 3), 1.0)
    with pytest.raises(ValueError, match="must be BoundedInput"):
        backpropagate_bounds(Sequential(SpectralDense(3, 3)), 1.0)
    with pytest.raises(ValueError, match=r"1\.scale"):
        backpropagate_bounds(Sequential(BoundedInput((3,), 1.0), Scale()), 1.0)
    with pytest.raises(ValueError, match="last dimension"):
        backpropagate_bounds(Sequential(BoundedInput((3,), 1.0), SpectralDense(4, 2)), 1.0)


def test_reparametrised_weights_are_refused():
    net = Sequential(BoundedInput((3,), 1.0), SpectralDense(3, 3))
    parametrizations.spectral_norm(net[1])
    with pytest.raises(ValueError, match="parametrizations"):
        backpropagate_bounds(net, 1.0)


def test_a_frozen_parameter_needs_no_bound():
    net = Sequential(BoundedInput((4,), 1.0), Householder(4, -1), SpectralDense(4, 2))
    net[1].angle.requires_grad_(False)
    assert list(backpropagate_bounds(net, 1.0)) == ["2.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_trained_models_withstand_the_search(name):
    found = audit_network(name, SMALL[name], train_steps=500)
    assert found["passed"], found["error"]
    assert 0.1 < found["worst"] <= 1.0


def test_the_audit_reports_a_wrong_bound():
    def wrong():
        return Sequential(BoundedInput((8,), 2.0), OrthogonalDense(8, 8), MaxMin(-1), Optimist(8, 4))

    found = audit_network("wrong", wrong, train_steps=3, steps=5, restarts=3)
    assert not found["passed"]
    assert "3.weight" in found["error"]
    json.dumps(found)
