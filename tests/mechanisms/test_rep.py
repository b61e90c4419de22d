"""REP and SHUFFLE: the metric is structure, the release is Algorithm 1, the cost is Gaussian(σ)."""

from __future__ import annotations

import copy

import pytest
import torch
from dp_accounting import GaussianDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from erlangen.gradients import PerSampleGradients
from erlangen.mechanisms import Context, StreamNoise, make_mechanism
from erlangen.mechanisms.clipping import Flat
from erlangen.mechanisms.rep import convolution_weights, initial_scales, normalised, structural_metric
from erlangen.models.equivariant import c8_steerable_cnn, equivariant_resnet9
from erlangen.models.standardised import StandardisedConv2d
from tests.gradients.reference import one_by_one, recorded


def network() -> nn.Module:
    torch.manual_seed(0)
    return c8_steerable_cnn(field_counts=(1, 2), kernel_size=3)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 9, 3))


def build(name: str, module: nn.Module, sigma: float = 0.0, bound: float = 1.0, **options):
    mechanism = make_mechanism(name, Context(sigma, Flat(bound), StreamNoise(1), module, 4.0, options))
    mechanism.bind({n: p for n, p in module.named_parameters() if p.requires_grad}, 4.0)
    return mechanism


def flat(values: dict[str, torch.Tensor], names, lead: int = 0) -> torch.Tensor:
    return torch.cat([values[n].double().flatten(lead) for n in names], -1)


@pytest.mark.parametrize("metric", ["escnn", "paper"])
@pytest.mark.parametrize("make", [network, plain])
def test_the_metric_is_positive_and_has_geometric_mean_one(make, metric):
    module = make()
    m = build("rep", module, metric=metric).geometry.m
    assert {n: t.shape for n, t in m.items()} == {n: p.shape for n, p in module.named_parameters()}
    assert abs(float(flat(m, m).log().mean())) < 1e-6
    assert float(flat(m, m).std()) > 0.01, "an isotropic metric would be ISO"


def test_he_scales_of_an_ordinary_network():
    module = nn.ModuleDict({
        "conv": nn.Conv2d(4, 6, 3, groups=2), "up": nn.ConvTranspose2d(4, 6, 2), "norm": nn.GroupNorm(2, 6),
        "linear": nn.Linear(7, 3), "embedding": nn.Embedding(5, 4), "layer": nn.LayerNorm([2, 3]),
    })  # fmt: skip
    scales = initial_scales(module)
    for name, want in {
        "conv.weight": 18**-0.5, "up.weight": 16**-0.5, "linear.weight": 7**-0.5, "embedding.weight": 1,
        "norm.weight": 1, "conv.bias": 1, "linear.bias": 1, "layer.weight": 1,
    }.items():  # fmt: skip
        torch.testing.assert_close(scales[name], torch.full_like(scales[name], want)), name


def test_the_metric_of_an_equivariant_network_is_its_initial_spread():
    module = network()
    scales = initial_scales(module)
    torch.testing.assert_close(scales["features.0.weight"], module.features[0].expansion.init_std())
    torch.testing.assert_close(scales["features.4.weight"], module.features[4].expansion.init_std())
    torch.testing.assert_close(scales["head.weight"], torch.full((10, 2), 2**-0.5))
    assert all(bool((scales[n] == 1).all()) for n in scales if n.endswith("bias") or n.startswith("features.2"))


@pytest.mark.parametrize("make", [network, plain, lambda: equivariant_resnet9(in_channels=1, layout=(2, 2, 4))])
def test_training_does_not_move_the_metric(make):
    module = make()
    before = structural_metric(module)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(3).add_(torch.randn_like(p))
    after = structural_metric(module)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_metric_read_off_the_weights_is_refused():
    class Leaky(nn.Linear):
        def init_std(self):
            return {"weight": self.weight.detach().abs() + 1e-3, "bias": torch.ones_like(self.bias)}

    with pytest.raises(ValueError, match=r"'0\.weight' changes with the weights"):
        build("rep", nn.Sequential(Leaky(3, 2)))


def test_a_metric_read_off_a_buffer_is_refused():
    """A running average of activations is a statistic of private records too."""

    class Running(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("seen", torch.ones(3))

        def init_std(self):
            return {"weight": self.seen.expand(2, 3).abs() + 1e-3, "bias": torch.ones_like(self.bias)}

    with pytest.raises(ValueError, match=r"'0\.weight' changes with the weights"):
        build("rep", nn.Sequential(Running()))


@pytest.mark.parametrize("kept", ["attribute", "counter", "mask"])
def test_a_metric_read_off_anything_that_records_have_touched_is_refused(kept):
    class Remembers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.seen = torch.ones(3)
            self.register_buffer("counter", torch.tensor(7))
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

        def forward(self, x):
            self.seen = x.detach().abs().mean(0)
            return super().forward(x)

        def init_std(self):
            read = {"attribute": self.seen, "counter": self.counter, "mask": self.mask.float() + 1}[kept]
            return {"weight": read.expand(2, 3) + 1e-3, "bias": torch.ones_like(self.bias)}

    module = nn.Sequential(Remembers())
    module(torch.randn(5, 3))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"'0\.weight' changes with the weights"):
        build("rep", module)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()), "the network itself is left alone"


def test_computed_weights_have_the_metric_of_their_layer_and_are_shuffled():
    class Halved(nn.Module):
        def forward(self, w):
            return w / 2

    convolution = nn.utils.parametrize.register_parametrization(nn.ConvTranspose2d(4, 6, 3), "weight", Halved())
    module = nn.Sequential(StandardisedConv2d(3, 4, 3, bias=False), convolution)
    scales = initial_scales(module)
    names = convolution_weights(module)
    assert names == ["0.weight", "1.parametrizations.weight.original"]
    assert float(scales["0.weight"].flatten()[0]) == pytest.approx(27**-0.5)
    assert float(scales[names[1]].flatten()[0]) == pytest.approx((4 * 9) ** -0.5)


@pytest.mark.parametrize("name", ["rep", "shuffle"])
def test_without_noise_the_release_is_algorithm_1(name):
    module = network()
    x = torch.randn(5, 1, 8, 8)
    mechanism = build(name, module, bound=0.05)
    grads = one_by_one(module, (x,))
    got = mechanism.release(recorded(module, (x,)))
    m = flat(mechanism.geometry.m, mechanism.shapes)
    white = flat(grads, mechanism.shapes, 1) / m
    assert (white.norm(dim=1) > 0.05).any(), "nothing was clipped: the test would say nothing"
    clipped = white * (0.05 / white.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(flat(got, mechanism.shapes), m * clipped.sum(0) / 4, rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(scale=st.floats(1e-3, 1e3), power=st.floats(-2, 2), metric=st.sampled_from(["escnn", "paper"]))
def test_contributions_are_bounded_in_whitened_coordinates(scale, power, metric):
    module = plain()
    mechanism = build("rep", module, bound=0.5, metric=metric, power=power)
    generator = torch.Generator().manual_seed(3)
    g = {n: scale * torch.randn(1, *s, generator=generator) for n, s in mechanism.shapes.items()}
    out = mechanism.release(g, expected_batch=1)
    white = flat(out, mechanism.shapes) / flat(mechanism.geometry.m, mechanism.shapes)
    assert float(white.norm()) <= 0.5 * (1 + 1e-5)


def test_the_noise_has_the_covariance_m_squared():
    module = nn.Sequential(nn.Linear(3, 2))
    mechanism = build("rep", module, sigma=1.5, bound=0.7)
    m = flat(mechanism.geometry.m, ["0.weight"])
    torch.testing.assert_close(mechanism.covariance("0.weight").diagonal(), (1.5 * 0.7 * m) ** 2)
    empty = PerSampleGradients.from_dense({n: torch.zeros(0, *s) for n, s in mechanism.shapes.items()})
    draws = torch.stack([flat(mechanism.release(empty, 1.0), ["0.weight"]) for _ in range(4000)])
    torch.testing.assert_close(draws.var(0), (1.5 * 0.7 * m) ** 2, rtol=0.15, atol=0)
    correlation = torch.corrcoef(draws.T) - torch.eye(6)
    assert correlation.abs().max() < 0.08


def test_the_event_is_one_gaussian_whatever_the_metric():
    for name in ("rep", "shuffle"):
        assert build(name, network(), sigma=1.2).event() == GaussianDpEvent(1.2)


def test_powers_between_iso_and_rep():
    module = network()
    one, half, zero = (build("rep", module, power=p).geometry.m for p in (1, 0.5, 0))
    for name in one:
        torch.testing.assert_close(half[name], one[name].sqrt())
        torch.testing.assert_close(zero[name], torch.ones_like(zero[name]))


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_shuffle_keeps_the_numbers_and_loses_their_places(scope):
    module = network()
    rep = build("rep", module).geometry.m
    first, again, other = (build("shuffle", module, seed=s, scope=scope).geometry.m for s in (1, 1, 2))
    convolutions = convolution_weights(module)
    assert convolutions == ["features.0.weight", "features.4.weight"]
    for name in rep:
        assert torch.equal(first[name], again[name])
        if name not in convolutions:
            assert torch.equal(first[name], rep[name])
        elif scope == "layer":
            assert torch.equal(first[name].sort().values, rep[name].sort().values)
    joined = [flat(values, convolutions) for values in (rep, first, other)]
    assert torch.equal(joined[0].sort().values, joined[1].sort().values)
    assert not torch.equal(joined[0], joined[1])
    assert not torch.equal(joined[1], joined[2])


def test_shuffle_does_not_touch_the_weights_nor_the_global_generator():
    module = network()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    build("shuffle", module, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_a_custom_metric_is_normalised_and_checked():
    module = nn.Sequential(nn.Linear(2, 2))
    m = build("rep", module, metric={"0.weight": [[1.0, 2.0], [4.0, 8.0]], "0.bias": 1.0}).geometry.m
    assert abs(float(flat(m, m).log().mean())) < 1e-6
    torch.testing.assert_close(m["0.weight"][0, 1] / m["0.weight"][0, 0], torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"no entry for parameter '0\.bias'"):
        build("rep", module, metric={"0.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="positive"):
        build("rep", module, metric={"0.weight": torch.zeros(2, 2), "0.bias": 1.0})
    with pytest.raises(ValueError, match=r"'0\.wieght', which is no trainable parameter.*0\.weight"):
        build("rep", module, metric={"0.wieght": 1.0, "0.weight": 1.0, "0.bias": 1.0})
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(3,\), the parameter \(2, 2\)"):
        build("rep", module, metric={"0.weight": torch.ones(3), "0.bias": 1.0})
    with pytest.raises(ValueError, match="metric is a Tensor"):
        build("rep", module, metric=torch.ones(6))


def test_options_that_do_nothing_are_refused():
    wrong = (({"metrics": "escnn"}, "no option"), ({"metric": "he"}, "choose one of"), ({"scope": "all"}, "scope"))
    for options, what in wrong:
        with pytest.raises(ValueError, match=what):
            build("shuffle", network(), **options)
    with pytest.raises(ValueError, match="no convolution"):
        build("shuffle", nn.Linear(2, 2))


def test_frozen_parameters_have_no_part_in_it():
    module = plain()
    module[0].requires_grad_(False)
    m = build("rep", module).geometry.m
    assert not any(name.startswith("0.") for name in m)
    assert abs(float(flat(m, m).log().mean())) < 1e-6


def test_normalisation_is_scale_free():
    scales = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([2.0])}
    ten = {n: 10 * t for n, t in scales.items()}
    for name, want in normalised(scales).items():
        torch.testing.assert_close(normalised(ten)[name], want)
