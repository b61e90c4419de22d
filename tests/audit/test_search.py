"""The search: it finds the worst direction at every seed, from what is known, and prefers what is known to what is fitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from erlangen.audit.distinguish import best_tail
from erlangen.audit.intervals import epsilon_lower
from erlangen.audit.montecarlo import Releaser, Subject
from erlangen.audit.named import audit_named
from erlangen.audit.neighbours import portfolio
from erlangen.audit.scores import along, fisher, separation
from erlangen.audit.search import choose, quiet_pairs, refined, scores, shift, stated_precision
from erlangen.mechanisms import Fourier, GaussianMechanism, PublishedGReDP, StreamNoise

SHAPES = {"conv": torch.Size([1, 1, 5])}


def uneven(seed: int = 0) -> Subject:
    """Noise of 0.8 on even and 0.6 on odd sequences: the worst canary is odd, and only two dimensions of five are."""

    def build():
        mechanism = PublishedGReDP(1.0, 1.0, Fourier(), StreamNoise(seed), split=(0.8, 0.6))
        mechanism.bind({"conv": torch.zeros(1, 1, 5)}, 4.0)
        return mechanism

    return Subject("uneven", build, SHAPES)


def strength(score) -> float:
    """μ of the chosen canary and score, exactly: ⟨w, clipped canary⟩/√(wᵀΣw)."""
    mechanism = uneven().build()
    v = along(score.pair)
    w = score.weights[:5]
    return float(abs(w @ v) / np.sqrt(w @ mechanism.covariance("conv").numpy() @ w))


@pytest.mark.parametrize("seed", range(10))
def test_the_worst_direction_is_found_at_every_seed(seed):
    score = choose(Releaser(uneven(seed)), portfolio(SHAPES, seed), 2000)
    assert strength(score) > 0.97 / 0.6


def test_directions_of_least_noise_are_stated_and_measured():
    found = {p.name: along(p) for p in quiet_pairs(Releaser(uneven()), 4000, lambda n: None)}
    odd = lambda v: float(np.linalg.norm(v - np.roll(v[::-1], 1)) / 2)  # noqa: E731
    assert all(odd(v) > 0.97 for v in found.values())
    assert {name.split(" ")[0] for name in found} == {"stated", "measured"}


def test_a_score_from_what_is_known_needs_no_pilot():
    releaser, pair = Releaser(uneven()), portfolio(SHAPES)[0]
    moved = shift(releaser, pair)
    want = along(pair) / 4.0  # clipped to C = 1, divided by B
    assert np.allclose(moved, want, atol=1e-5)
    precision = stated_precision(releaser.mechanism)
    assert np.allclose(precision @ releaser.mechanism.covariance("conv").numpy(), np.eye(5), atol=1e-6)
    known = next(iter(scores(releaser, pair, torch.zeros(0, 5), torch.zeros(0, 5), precision)))
    assert known.name == "likelihood ratio"
    assert releaser.mechanism.noise.description != "none"  # the noise is back


def test_refinement_is_a_power_iteration_towards_the_worst_direction():
    releaser, pair = Releaser(uneven()), portfolio(SHAPES)[0]
    precision, values = stated_precision(releaser.mechanism), []
    for _ in range(6):
        v = along(pair)
        values.append(float(v @ precision @ v))
        known = next(iter(scores(releaser, pair, torch.zeros(0, 5), torch.zeros(0, 5), precision)))
        pair = refined(known)
    assert np.all(np.diff(values) > -1e-6)
    assert values[-1] == pytest.approx(1 / 0.36, rel=1e-2)


def test_what_is_known_is_preferred_to_what_was_fitted_to_noise():
    def build():
        mechanism = GaussianMechanism(2.0, 1.0, noise=StreamNoise(3))
        mechanism.bind({"w": torch.zeros(40)}, 4.0)
        return mechanism

    shapes = {"w": torch.Size([40])}
    score = choose(Releaser(Subject("iso", build, shapes)), portfolio(shapes)[:3], 200)
    w, v = score.weights, along(score.pair)
    assert score.view == "plain"
    assert abs(w @ v) / np.linalg.norm(w) > 0.999


def test_separation_and_fisher_on_gaussians():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 40_000), rng.normal(0, 1, 40_000)
    assert separation(a, b) == pytest.approx(2 * ndtr(0.5) - 1, abs=0.01)
    assert separation(b, a) == pytest.approx(separation(a, b))
    spread = np.array([[1.0, 0.6], [0.6, 2.0]])
    shift = np.array([0.5, -0.3])
    noise = lambda: rng.multivariate_normal([0, 0], spread, 100_000)  # noqa: E731
    found = fisher(noise() + shift, noise())
    want = np.linalg.solve(spread, shift)
    assert found @ want / np.linalg.norm(found) / np.linalg.norm(want) > 0.999


def test_tails_are_chosen_with_caution():
    """The chosen threshold's true worth stays near the best one's, whatever the luck of the pilot."""
    mu, n, worth = 0.379, 18_000_000, []

    def true_worth(t: float, sign: float) -> float:
        from erlangen.audit.intervals import Counts

        fpr, fnr = (ndtr(-t), ndtr(t - mu)) if sign > 0 else (ndtr(t), ndtr(mu - t))
        return epsilon_lower(Counts(round(n * fpr), n, round(n * fnr), n), 1e-5, 0.001)

    for seed in range(6):
        rng = np.random.default_rng(seed)
        chosen = best_tail(rng.normal(mu, 1, 500_000), rng.normal(0, 1, 500_000), (n, n), 1e-5, 0.001)
        worth.append(true_worth(chosen.value, chosen.sign))
    best = max(true_worth(t, 1.0) for t in np.linspace(2.5, 4.5, 41))
    assert min(worth) > 0.85 * best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_gredp_complex_reaches_its_bar_at_every_seed(seed):
    found = audit_named("gredp", {"as_published": "complex"}, claim_epsilon=1.0, seed=seed)
    assert found.exact == pytest.approx(1.465, abs=1e-3)
    assert 1.19 < found.lower_bound["99.9%"] < found.exact
    assert 1.44 < found.gdp_lower_bound["99.9%"] < found.exact


def test_a_score_of_few_values_is_cut_where_it_tells_most():
    from erlangen.audit.distinguish import balanced

    rng = np.random.default_rng(1)
    w, o = (rng.random(4000) < 0.16).astype(float), (rng.random(4000) < 0.5).astype(float)
    chosen = balanced(w, o)
    assert (chosen.value, chosen.sign) == (0.5, -1.0)
    counts = chosen.count(w, o)
    assert counts.fp / 4000 == pytest.approx(0.5, abs=0.03)
    assert counts.fn / 4000 == pytest.approx(0.16, abs=0.03)
