"""Training steps as releases: through the engine, records in, private gradients out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen import lipschitz as lip
from erlangen.audit import canaries, zoo
from erlangen.audit.broken import mechanisms as broken_mechanisms
from erlangen.audit.montecarlo import Subject, audit_releases
from erlangen.audit.recipes import Recipe, dense_lipschitz_network
from erlangen.audit.steps import Step, audit_step, gradients, hostile, strongest
from erlangen.audit.verdict import CONSISTENT, VIOLATED
from erlangen.mechanisms import GaussianMechanism, StreamNoise
from erlangen.models import register_model
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session


def clipless(split: str = "optimal", sigma: float = 1.0) -> Step:
    torch.manual_seed(0)
    return Step(dense_lipschitz_network(), (5,), "clipless", {"loss": 1.0, "split": split}, sigma=sigma)


@pytest.mark.parametrize("split", ["optimal", "local", "global"])
def test_the_search_reaches_the_certified_sensitivity_and_never_passes_it(split):
    found = audit_step("clipless", lambda: clipless(split))
    assert found.verdict == CONSISTENT
    assert 0.999 < found.facts["sensitivity"] <= 1.0


def test_a_step_is_the_mechanism_on_the_records_own_gradients():
    """Through the engine in two physical parts: the noiseless release is the clipped sum by hand."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    step = Step(network, (2, 2), "iso", sigma=0.0, bound=0.3)
    records = {"x": torch.randn(5, 2, 2), "y": torch.randn(5, 3)}
    got = step.release(records)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    plain.load_state_dict(network.state_dict())
    total = {n: torch.zeros_like(p) for n, p in plain.named_parameters()}
    for k in range(5):
        g = gradients(plain, records["x"][k : k + 1], records["y"][k : k + 1])
        length = torch.stack([v.square().sum() for v in g.values()]).sum().sqrt()
        for n in total:
            total[n] += g[n] * (0.3 / length).clamp(max=1.0)
    assert all(torch.allclose(got[n], total[n] / 4, atol=1e-6) for n in total)
    empty = step.release({n: t[:0] for n, t in records.items()})
    assert all(float(t.abs().max()) == 0 for t in empty.values())


@pytest.mark.parametrize("name", ["iso", "rep", "gredp", "geodp"])
def test_clipping_mechanisms_hold_in_training(name):
    build = next(iter(Recipe(name, {}).steps()))
    found = audit_step(name, build)
    assert found.verdict == CONSISTENT
    assert 0.99 < found.facts["sensitivity"] <= 1.0


@pytest.mark.parametrize(
    "kind",
    [broken_mechanisms.UnclippedBatch, broken_mechanisms.DividedByRealisedBatch, broken_mechanisms.ClipAfterMean],
)
def test_broken_mechanisms_are_caught_in_training(kind):
    def build() -> Step:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 2, bias=False))
        return Step(network, (1, 4, 4), kind(1.0, 0.7, noise=StreamNoise(1)), sigma=1.0, bound=0.7)

    assert audit_step("broken", build).verdict == VIOLATED


@pytest.mark.parametrize("specimen", [s for s in zoo.zoo() if s.kind == "bounds"], ids=lambda s: s.name)
def test_broken_lipschitz_layers_are_caught_in_training(specimen):
    found = audit_step(specimen.name, lambda: zoo.trained(*specimen.make()))
    assert (found.verdict == VIOLATED) == bool(specimen.bug), found.reason


@pytest.mark.slow
def test_monte_carlo_on_training_steps():
    """Consistent at the noise that is claimed, and violated at half of it."""
    step = clipless(sigma=1.0)
    pairs = list(hostile(step))[:2]
    strong = strongest(step)[0][0]
    assert strong == pytest.approx(1.0, abs=1e-3)  # in units of the noise, σ = 1

    class Half(Step):
        def event(self):
            return GaussianMechanism(2.0).event()

    build = lambda kind: lambda: kind(dense_lipschitz_network(), (5,), "clipless", {"loss": 1.0}, sigma=1.0, parts=1)  # noqa: E731
    assert audit_releases(Subject("s", build(Step), step.shapes), 400, pairs=pairs, pilot=100).verdict == CONSISTENT
    assert audit_releases(Subject("s", build(Half), step.shapes), 1200, pairs=pairs, pilot=100).verdict == VIOLATED


# --- record canaries in a whole run ----------------------------------------------------------------------------------


def dense(shape, classes, **options):
    return lip.Sequential(lip.BoundedInput(tuple(shape), 1.0), lip.Flatten(), lip.SpectralDense(64, classes))


@pytest.fixture(scope="module")
def config():
    register_model("test-lipschitz-dense", dense)
    return TrainConfig(
        model="test-lipschitz-dense", mechanism="clipless", mechanism_options={"loss": "cross-entropy"}, epsilon=None,
        noise_multiplier=1.0, batch=64, steps=40, ema=0.0, seed=5,
    )  # fmt: skip


def audited(config, factor: float = 1.0, run: int = 0):
    session = Session(config, run_id="records")
    noise = session.training.mechanism.noise
    honest = noise.perturb
    noise.perturb = lambda value, std: honest(value, std * factor)
    found = {f.audit: f for f in canaries.audit_run(session, "run", run=run)}
    return session, found


def test_record_canaries_of_a_sound_clipless_run(config):
    session, found = audited(config, run=8)
    assert {f.verdict for f in found.values()} <= {CONSISTENT, "inconclusive"}
    release = found["release canaries"]
    assert release.verdict == CONSISTENT
    assert 0.5 < release.facts["largest_share_of_sensitivity"] <= 1.0
    assert 0 < release.gdp_lower_bound["95%"] < release.claim
    assert 0.9 < release.facts["noise_upper_limit"] < 1.3
    assert "run canaries" not in found  # their scores are not independent
    assert "one run" in found
    assert "finish" not in session.training.mechanism.__dict__
    assert session.accountant.steps == 40


def test_canaries_use_up_what_a_scaling_network_lets_in():
    """The default network multiplies images before it cuts them: a canary at the cut itself would be four times too weak."""
    config = TrainConfig(mechanism="clipless", epsilon=None, noise_multiplier=1.0, batch=64, steps=20, ema=0.0, seed=1)
    tap = canaries.make_tap(session := Session(config, run_id="reach"), 3, 0, seed=1)
    session.step()
    tap.remove()
    assert tap.facts["largest_share_of_sensitivity"] > 0.99


def test_record_canaries_find_missing_noise(config):
    _, found = audited(config, 0.6)
    assert found["noise along canaries"].verdict == VIOLATED
    assert found["noise along canaries"].facts["noise_upper_limit"] < 0.75


def test_record_canaries_pass_through_the_real_path(config):
    """With almost no noise the canary's gradient is read off exactly: what was inserted is what the attacker computed."""
    session = Session(config, run_id="exact")
    mechanism = session.training.mechanism
    honest = mechanism.noise.perturb
    mechanism.noise.perturb = lambda value, std: honest(value, std * 1e-6)
    tap = canaries.make_tap(session, 3, 0, seed=1)
    session.step()
    tap.remove()
    scores, there = tap.seen().release_scores, tap.seen().release_in
    assert (abs(scores[~there]) < 1e-3).all()
    assert (scores[there] > 0.05).all()
