"""GReDP: the sound form is DP-SGD in distribution; the published readings fail as computed, and are priced so."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import epsilon, gaussian
from erlangen.mechanisms import Fourier, GaussianMechanism, PublishedGReDP, StreamNoise
from erlangen.mechanisms.clipping import Flat, PerLayer
from erlangen.mechanisms.frequency import parity
from erlangen.models import make_model
from tests.mechanisms.attacks import attack_gredp, exact
from tests.mechanisms.test_spectral import SIZES, build, sampled_covariance, wrong_by


def smallest_eigenvalue(covariance: torch.Tensor) -> float:
    return float(torch.linalg.eigvalsh(covariance)[0])


@pytest.mark.parametrize("shape", SIZES)
def test_the_sound_form_is_iso_in_distribution(shape):
    """Same clipped sum, same covariance, Gaussian in every direction tried: the same mechanism."""
    g = {"k": torch.randn(6, 2, 3, *shape) * 2, "b": torch.randn(6, 5)}
    quiet = [build("gredp", 0.0).release(g, 6.0), GaussianMechanism(0.0, 1.0).release(g, 6.0)]
    for name in g:
        torch.testing.assert_close(quiet[0][name], quiet[1][name], rtol=1e-4, atol=1e-6)
    sound, iso = build("gredp", 1.7), GaussianMechanism(1.7, 1.0)
    for mechanism in (sound, iso):
        mechanism.bind({"k": torch.zeros(1, 1, *shape)})
    torch.testing.assert_close(sound.covariance("k"), iso.covariance("k"))
    large = build("gredp", 1.7)
    noise = large.release({"k": torch.zeros(1, 20_000, 1, *shape)}, 1.0)["k"].reshape(20_000, -1).double()
    for direction in (torch.ones(noise.shape[1]), torch.arange(noise.shape[1]) - 1.0):
        projected = noise @ (direction.double() / direction.norm())
        assert stats.kstest(projected.numpy() / 1.7, "norm").pvalue > 1e-4
    assert sound.event() == iso.event()
    assert sound.metric("k") is None  # Parseval: norms need no transform


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("split", [(math.sqrt(0.5), math.sqrt(0.5)), (1.0, 0.0), (0.8, 0.6), (0.6, 0.8)])
def test_published_covariance_is_the_formula(split, shape):
    mechanism = PublishedGReDP(1.5, 2.0, Fourier(), StreamNoise(3), split)
    mechanism.bind({"k": torch.zeros(1, 1, *shape)})
    want = mechanism.covariance("k")
    large = PublishedGReDP(1.5, 2.0, Fourier(), StreamNoise(3), split)
    assert wrong_by(sampled_covariance(large, shape), want) < 5
    marginal = mechanism.noise_std("k").double().flatten().square()
    torch.testing.assert_close(marginal, want.diagonal(), rtol=1e-5, atol=1e-6)
    index = torch.arange(want.shape[0]).view(shape)
    has_odd = not torch.equal(parity(index, range(len(shape))), index)
    least = min(split) if has_odd else split[0]
    assert smallest_eigenvalue(want) == pytest.approx((least * 1.5 * 2.0) ** 2, abs=1e-9)


def test_marginal_variances_cannot_see_the_failure():
    """Real noise has the claimed marginal variance ½σ²c² on most coordinates, and none at all on odd directions."""
    mechanism = build("gredp", 1.0, as_published="real")
    mechanism.bind({"k": torch.zeros(1, 1, 9)})
    covariance = mechanism.covariance("k")
    assert float(covariance.diagonal()[1:].min()) == pytest.approx(0.5)
    assert smallest_eigenvalue(covariance) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shape", [(7,), (8,), (3, 3), (4, 4)])
def test_real_noise_releases_the_odd_part_exactly(shape):
    g = torch.randn(1, 2, 3, *shape, dtype=torch.float64)
    g = g / g.norm()
    dims = tuple(range(-len(shape), 0))
    mechanism = build("gredp", 100.0, Flat(1.0), as_published="real")
    released = mechanism.release({"k": g})["k"]
    odd = lambda x: (x - parity(x, dims)) / 2  # noqa: E731
    torch.testing.assert_close(odd(released), odd(g[0]), rtol=1e-9, atol=1e-10)
    assert float((released - g[0]).norm()) > 100
    assert epsilon(mechanism.event(), 1e-5) == math.inf
    assert "odd part" in mechanism.unsound
    assert "odd part" in mechanism.describe()["guarantee"]


def test_imaginary_noise_releases_the_even_part_exactly():
    """And the reason says which part, also where the split was moved by hand."""
    g = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    g = g / g.norm()
    mechanism = build("gredp", 100.0, Flat(1.0), as_published="complex")
    mechanism.split = (0.0, 1.0)
    released = mechanism.release({"k": g})["k"]
    even = lambda x: (x + parity(x, (-1,))) / 2  # noqa: E731
    torch.testing.assert_close(even(released), even(g[0]), rtol=1e-9, atol=1e-10)
    assert epsilon(mechanism.event(), 1e-5) == math.inf
    assert "even part" in mechanism.describe()["guarantee"]


@pytest.mark.parametrize(("reading", "said"), [
    ("complex", "0.707107·σC on real and 0.707107·σC on imaginary parts, once per batch"),
    ("real", "1·σC on real and 0·σC on imaginary parts, once per batch"),
    ("per-sample", "imaginary parts, for each sample of the expected batch"),
])  # fmt: skip
def test_a_certificate_says_which_noise_the_spectrum_had(reading, said):
    assert said in build("gredp", 1.0, Flat(1.0), as_published=reading).describe()["spectrum_noise"]


def test_events_are_what_the_smallest_eigenvalue_says():
    """Multiplier = smallest noise / sensitivity, jointly over the layers, for every reading."""
    layers = {f"{name}.weight": torch.zeros(2, 1, 3, 3) for name in "abc"}
    for rule, count in ((Flat(0.5), 1), (PerLayer(0.5), 3), (PerLayer(0.5, groups="tensors"), 3)):
        for reading, factor in (("complex", math.sqrt(0.5)), ("per-sample", math.sqrt(0.5 * 40))):
            mechanism = build("gredp", 1.2, rule, as_published=reading)
            mechanism.bind(layers, 40.0)
            inverse = sum(0.25 / smallest_eigenvalue(mechanism.covariance(n)) for n in layers)
            true = inverse**-0.5 if count > 1 else math.sqrt(smallest_eigenvalue(mechanism.covariance("a.weight"))) / 0.5
            assert mechanism.event().noise_multiplier == pytest.approx(1.2 * factor / math.sqrt(count))
            assert true == pytest.approx(1.2 * factor / math.sqrt(count))
            assert mechanism.event(2.4).noise_multiplier == pytest.approx(2.4 * factor / math.sqrt(count))
            assert mechanism.sensitivity == pytest.approx(0.5 * math.sqrt(count))


def test_no_price_before_the_layers_are_known():
    with pytest.raises(RuntimeError, match="bind"):
        build("gredp", 1.0, PerLayer(1.0), as_published="complex").event()


def test_theorem_two_is_priced_by_its_smaller_half():
    mechanism = build("gredp", 1.0, as_published="complex", split=(0.8, 0.6))
    assert mechanism.event() == gaussian(0.6)
    assert build("gredp", 1.0, as_published="complex", split=(0.0, 1.0)).unsound is not None


def test_per_sample_noise_is_root_b_times_larger():
    mechanism = build("gredp", 1.0, as_published="per-sample")
    mechanism.bind({"k": torch.zeros(20_000, 1, 5)}, 16.0)
    released = mechanism.release({"k": torch.zeros(1, 20_000, 1, 5)}, 1.0)["k"]
    assert float(released.std()) == pytest.approx(4 * math.sqrt(0.5), rel=0.02)


def test_the_published_claim_is_refuted_by_experiment():
    """σ = 1.0811 claims ε = 4; the lower bound is above it. The sound form survives the same attack."""
    claimed = exact(1.0811)
    assert claimed == pytest.approx(4.0, abs=0.01)
    assert claimed + 0.05 < attack_gredp(1.0811, 4_000_000) < exact(1.0811 / math.sqrt(2))
    assert attack_gredp(1.0811, 1_000_000, sound=True) < claimed


def test_with_many_layers_a_few_thousand_trials_refute_it():
    """Twenty layers, each clipped at c with its own noise σ·c/√2: the claim is ε = 1, the truth σ/√40."""
    assert 3 * exact(3.731) < attack_gredp(3.731, 40_000, layers=20) < exact(3.731 / math.sqrt(40))


def test_published_readings_need_the_word():
    with pytest.raises(ValueError, match="readings"):
        build("gredp", as_published="half")
    with pytest.raises(ValueError, match="sound form has white noise"):
        build("gredp", split=(0.6, 0.8))
    with pytest.raises(ValueError, match="not of 'real'"):
        build("gredp", as_published="real", split=(0.6, 0.8))
    with pytest.raises(ValueError, match=r"a² \+ b² = 1"):
        build("gredp", as_published="complex", split=(1.0, 1.0))
    with pytest.raises(ValueError, match="no option"):
        build("gredp", ratio=0.5)


@pytest.mark.parametrize(("reading", "finite"), [("complex", True), ("real", False), ("per-sample", True)])
def test_through_the_engine_epsilon_tells_the_truth(reading, finite):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
    data = TensorDataset(torch.randn(40, 1, 8), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=2.0, max_grad_norm=1.0, mechanism="gredp", mechanism_options={"as_published": reading},
        clipping="per-layer",
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert (engine.get_epsilon(1e-5) < math.inf) == finite
    if reading == "complex":
        assert engine.training.mechanism.event().noise_multiplier == pytest.approx(2 / math.sqrt(4))  # two layers
    if reading == "per-sample":
        assert engine.training.mechanism.event().noise_multiplier == pytest.approx(2 * math.sqrt(10 / 4))


@pytest.mark.parametrize("name", ["gredp", "spectral"])
@pytest.mark.parametrize(("options", "layers"), [({}, 5), ({"groups": "layers"}, 5), ({"groups": "tensors"}, 10)])
def test_a_layer_is_a_module_and_not_a_tensor(name, options, layers):
    """LeNet-5 has five layers. Whatever is clipped by itself is clipped at C, noised at σC, and counted."""
    published = {"gredp": "complex", "spectral": True}[name]
    model = make_model("lenet", (1, 28, 28), 10)
    mechanism = build(name, 2.0, PerLayer(0.5, **options), as_published=published)
    mechanism.bind(dict(model.named_parameters()), 8.0)
    factor = {"gredp": math.sqrt(0.5), "spectral": 1.0}[name]
    assert mechanism.event().noise_multiplier == pytest.approx(2 * factor / math.sqrt(layers))
    facts = mechanism.describe()
    assert facts["layers"] == layers
    assert ("weight and bias together" in facts["clipped"]) == (layers == 5)
    assert mechanism.sensitivity == pytest.approx(0.5 * math.sqrt(layers))
    assert {mechanism.layer_std(name) for name in mechanism.shapes} == {1.0}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("spectral", {"as_published": True}, "4·T⁺T⁺ᵀ"), ("gredp", {"as_published": "complex"}, "2 on even and 2 on odd"),
        ("gredp", {"as_published": "real"}, "4 on even and 0 on odd"),
        ("gredp", {"as_published": "per-sample"}, "20 on even and 20 on odd"),
    ],
)  # fmt: skip
def test_a_certificate_states_the_noise_of_a_layer_not_of_all(name, options, words):
    """σC = 2 on each of three layers, clipped at 1 each: the joint sensitivity √3 is not in the noise."""
    mechanism = build(name, 2.0, PerLayer(1.0), **options)
    mechanism.bind({f"{layer}.weight": torch.zeros(1, 1, 3) for layer in "abc"}, 10.0)
    assert mechanism.describe()["covariance"].startswith(words)
    found = sorted({round(float(e), 6) for e in torch.linalg.eigvalsh(mechanism.covariance("a.weight"))})
    assert found[-1] == pytest.approx(float(words.split("·")[0].split(" ")[0]))


@pytest.mark.parametrize(("groups", "norms"), [("layers", 1), ("tensors", 2)])
def test_weight_and_bias_of_a_layer_share_one_bound(groups, norms):
    """Huge gradients in both: together they have norm C in one group, and C each in two."""
    g = {"l.weight": torch.full((1, 4, 2), 100.0), "l.bias": torch.full((1, 4), 70.0)}
    mechanism = build("gredp", 0.0, PerLayer(0.5, groups=groups), as_published="complex")
    released = mechanism.release(g)
    total = torch.cat([released["l.weight"].flatten(), released["l.bias"]]).norm()
    assert float(total) == pytest.approx(0.5 * math.sqrt(norms), rel=1e-4)


def test_state_resumes_exactly():
    g = {"k": torch.randn(4, 2, 1, 3, 3)}
    first = build("gredp", seed=5, as_published="complex")
    first.release(g)
    again = build("gredp", seed=5, as_published="complex")
    again.bind({"k": g["k"][0]})
    again.load_state_dict(first.state_dict())
    assert torch.equal(first.release(g)["k"], again.release(g)["k"])
