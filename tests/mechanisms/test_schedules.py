"""σ and bounds that move between two steps: what is clipped, what is noised and what is accounted move together."""

from __future__ import annotations

import math

import pytest
import torch

from erlangen.accounting import gaussian
from erlangen.gradients.tape import PerSampleGradients
from erlangen.lipschitz import BackwardClip
from erlangen.mechanisms import Fourier, GaussianMechanism, make_mechanism
from erlangen.mechanisms.base import Context
from erlangen.mechanisms.clipping import AdaptiveQuantile, Flat, PerLayer
from erlangen.mechanisms.noise import StreamNoise
from erlangen.mechanisms.published import Layerwise, PublishedGReDP
from tests.engines import loop, private
from tests.mechanisms.lipschitz_runs import mechanism, network
from tests.processes import together

ONE = {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(4)}


def huge() -> PerSampleGradients:
    """One record that every rule clips."""
    return PerSampleGradients.from_dense({name: 1e3 * torch.ones(1, *t.shape) for name, t in ONE.items()})


def in_units_of_noise(built: GaussianMechanism) -> float:
    """How far one record moves the release: at most 1/σ' for an event Gaussian(σ')."""
    built.accumulate(huge())
    sums = built.clipped_sum()
    return math.sqrt(sum(float((t / built.noise_std(name)).square().sum()) for name, t in sums.items()))


@pytest.mark.parametrize("moved", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    "built",
    [
        lambda: GaussianMechanism(2.0, PerLayer([3.0, 4.0])),
        lambda: GaussianMechanism(2.0, PerLayer(5.0)),
        lambda: Layerwise(2.0, Flat(1.0), Fourier()),
        lambda: Layerwise(2.0, PerLayer([3.0, 4.0], groups="layers"), Fourier()),
        lambda: PublishedGReDP(2.0, Flat(1.0), Fourier()),
    ],
    ids=["per-layer", "shared", "layerwise", "layerwise per-layer", "gredp"],
)
def test_where_the_bound_moves_the_noise_moves_with_it(built, moved):
    made = built()
    made.bind(ONE)
    made.clipping.bound *= moved
    reach = in_units_of_noise(made)
    assert reach <= (1 + 1e-6) / made.event().noise_multiplier
    assert reach > 0.4 / made.event().noise_multiplier


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e-30])
def test_a_bound_moves_only_to_what_it_could_have_been_from_the_beginning(bound):
    """At C = 1e-30 a gradient of 1e-24 has a squared norm of 0 in float32, and would pass a million bounds long."""
    made = GaussianMechanism(1.0, 1.0)
    with pytest.raises(ValueError, match="max_grad_norm is"):
        made.clipping.bound = bound
    with pytest.raises(ValueError, match="max_grad_norm is"):
        made.clipping.load_state_dict({"bound": bound})
    assert made.clipping.bound == 1.0


def test_noise_that_grows_beyond_what_an_adaptive_rule_counts_with_is_refused_with_the_cure():
    made = GaussianMechanism(1.0, AdaptiveQuantile(1.0))
    made.bind(ONE, 8.0)
    made.noise_multiplier = 40.0
    with pytest.raises(ValueError, match=r"count_std is 5.0 but the noise multiplier is 40.0.* Give count_std > 20"):
        made.release({name: torch.zeros(1, *t.shape) for name, t in ONE.items()})


def test_bounds_of_layers_keep_their_proportions_under_a_loaded_state():
    """A state holds C alone: a rule built with other bounds must not clip at one C and be noised for another."""
    made, other = (GaussianMechanism(1.0, PerLayer(bounds)) for bounds in ([3.0, 4.0], [30.0, 40.0]))
    other.bind(ONE)
    other.load_state_dict(made.state_dict())
    assert other.sensitivity == 5.0
    assert in_units_of_noise(other) <= 1 + 1e-6


def test_a_published_mechanism_does_not_change_its_bound_between_parts():
    made = Layerwise(1.0, Flat(10.0), Fourier())
    made.bind(ONE)
    made.accumulate(huge())
    made.clipping.bound = 0.1
    with pytest.raises(RuntimeError, match="between steps only"):
        made.finish(1.0)


@pytest.mark.parametrize("form", ["direction", "shrink", "angles"])
def test_magnitudes_are_reported_below_the_bound_that_is_noised_for(form):
    made = make_mechanism("geodp", Context(1.0, Flat(10.0), StreamNoise(0), torch.nn.Linear(1, 1), 1.0, {"form": form}))
    made.bind(ONE)
    made.accumulate(huge())
    made.clipping.bound = 0.1
    with pytest.raises(RuntimeError, match="between steps only"):
        made.accumulate(huge())
    with pytest.raises(RuntimeError, match="between steps only"):
        made.finish(1.0)


# -- clipless -----------------------------------------------------------------------------------------------------------


def test_clipless_noise_follows_the_noise_multiplier_that_is_accounted():
    built = mechanism(network())
    for sigma in (1.0, 10.0, 0.1):
        built.noise_multiplier = sigma
        released = built.finish(1.0)
        drawn = torch.cat([(t / built.noise_std(name)).flatten() for name, t in released.items()])
        assert 0.8 < float(drawn.std()) < 1.2
        whole = sum((built._delta[name] / built.noise_std(name)) ** 2 for name in released) ** -0.5
        assert whole == pytest.approx(built.event().noise_multiplier)


def test_clipless_noise_follows_the_thresholds_of_the_network():
    net = network(BackwardClip(0.01))
    (clip,) = (m for m in net.modules() if isinstance(m, BackwardClip))
    built = mechanism(net, 1.0)
    name = next(iter(built.shapes))
    before = built.noise_std(name)
    clip.bound = 0.02
    assert built.noise_std(name) == pytest.approx(2 * before)
    record = PerSampleGradients.from_dense({n: torch.ones(1, *shape) for n, shape in built.shapes.items()})
    built.accumulate(record)
    clip.bound = 0.001
    with pytest.raises(RuntimeError, match="between steps only"):
        built.accumulate(record)
    with pytest.raises(RuntimeError, match="between steps only"):
        built.finish(1.0)


@pytest.mark.parametrize("split", [(1.0, 0.0), (0.6, 0.8)])
def test_whatever_is_moved_between_two_steps_is_accounted_as_it_is(split):
    """Not σ alone: with a = 1, b = 0 the odd part is bare from that step on, and no ε of before covers it."""
    engine, *training = private(mechanism="gredp", mechanism_options={"as_published": "complex"})
    loop(*training)
    engine.training.mechanism.split = split
    loop(*training)
    (before, _), (after, _) = engine.accountant.history
    assert (before.event, after.event) == (gaussian(math.sqrt(0.5)), gaussian(min(split)))
    assert math.isinf(engine.get_epsilon(1e-5)) == (min(split) == 0)


# -- several workers ----------------------------------------------------------------------------------------------------


def magnitudes(workers) -> str:
    """One worker alone lets magnitudes through that are a hundred times as large."""
    from torch.utils.data import DataLoader, TensorDataset

    import erlangen

    engine, model = erlangen.PrivacyEngine(seed=0), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), batch_size=2)
    _, _, private = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, mechanism="geodp"
    )
    if workers.rank == 1:
        engine.training.mechanism.clipping.bound = 100.0
    try:
        for x, y in private:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    except (ValueError, RuntimeError) as error:
        return f"{engine.accountant.steps} {error}"
    return "trained"


def test_workers_report_magnitudes_below_one_bound():
    assert all("0 " in said and "clipping bound" in said for said in together(2, magnitudes))
