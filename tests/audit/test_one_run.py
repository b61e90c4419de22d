"""The one-run bound against brute force, and the training audits that use it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from erlangen import accounting
from erlangen.audit.intervals import Counts
from erlangen.audit.one_run import Guesses, best_guesses, guess
from erlangen.audit.subsampled import epsilon_lower, noise_upper, refuted


def _simulate(
    m: int, r: int, epsilon: float, delta: float, trials: int, rng: np.random.Generator, all_at_once: bool
) -> np.ndarray:
    """Right guesses against an (ε, δ)-DP mechanism: randomised response, which reveals bits outright with probability δ.

    All bits together with one coin, or each bit with its own: both change by δ in total variation when one bit changes.
    """
    q = 1 / (1 + math.exp(-epsilon))
    reveal = rng.random((trials, 1 if all_at_once else m)) < delta
    right = (rng.random((trials, m)) < q) | reveal
    revealed_first = np.argsort(~np.broadcast_to(reveal, right.shape), axis=1, kind="stable")[:, :r]
    return np.take_along_axis(right, revealed_first, 1).sum(1)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_p_value_is_exact_for_randomised_response(epsilon):
    rng = np.random.default_rng(3)
    m = r = 60
    right = _simulate(m, r, epsilon, 0.0, 20_000, rng, True)
    for v in range(r // 2, r + 1, 4):
        p = Guesses(m, r, v).p_value(epsilon, 0.0)
        assert abs((right >= v).mean() - p) < 4 * math.sqrt(p * (1 - p) / 20_000) + 1e-3


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize(("m", "r"), [(40, 40), (100, 20)])
def test_p_value_bounds_mechanisms_that_sometimes_reveal_everything(m, r, all_at_once):
    rng, trials = np.random.default_rng(4), 60_000
    for epsilon, delta in ((0.5, 0.01), (1.0, 0.003), (2.0, 0.02)):
        right = _simulate(m, r, epsilon, delta, trials, rng, all_at_once)
        for v in range(r // 2, r + 1, 2):
            p, seen = Guesses(m, r, v).p_value(epsilon, delta), (right >= v).mean()
            assert seen <= p + 4 * math.sqrt(max(seen, 1e-4) / trials), (epsilon, delta, v)


def test_the_second_term_is_the_formula_summed_by_hand():
    m, r, v, epsilon, delta = 50, 30, 25, 1.0, 1e-3
    q = 1 / (1 + math.exp(-epsilon))
    pmf = lambda k: stats.binom.pmf(k, r, q)  # noqa: E731
    worst = max(sum(pmf(v - j) for j in range(1, i + 1)) / i for i in range(1, v + 1))
    want = stats.binom.sf(v - 1, r, q) + 2 * m * delta * worst
    assert Guesses(m, r, v).p_value(epsilon, delta) == pytest.approx(want, rel=1e-12)


def test_epsilon_lower_is_where_the_p_value_crosses():
    g = Guesses(1000, 100, 95)
    e = g.epsilon_lower(1e-5, 0.05)
    assert g.p_value(e * 0.999, 1e-5) < 0.05 <= g.p_value(e * 1.001, 1e-5)
    assert Guesses(1000, 100, 50).epsilon_lower(1e-5, 0.05) == 0.0


def test_bounds_at_known_epsilon_reach_the_expected_medians():
    rng = np.random.default_rng(0)
    for epsilon, least in ((4.0, 1.2), (8.0, 2.4)):
        mu, found = 1 / accounting.noise_multiplier(epsilon, 1e-5, 1.0, 1), []
        made = best_guesses(1000, mu, 1e-5)
        for _ in range(20):
            included = rng.random(1000) < 0.5
            found.append(guess(rng.normal(0, 1, 1000) + mu * included, included, made).epsilon_lower(1e-5, 0.05))
        assert least < np.median(found) < epsilon


def test_guesses_do_not_look_at_the_coins():
    rng = np.random.default_rng(1)
    rates = [guess(rng.random(400), rng.random(400) < 0.5, 200).right / 200 for _ in range(200)]
    assert abs(np.mean(rates) - 0.5) < 0.015


def _sampled_scores():
    """Error counts of the best score of a canary over T sampled steps."""
    rng, sigma, q, steps, n = np.random.default_rng(2), 0.8, 0.2, 4, 2000
    inside = rng.random((n, steps)) < q
    noise = lambda: rng.normal(0, sigma, (n, steps))  # noqa: E731
    ratio = lambda x: np.log1p(q * np.expm1((x - 0.5) / sigma**2)).sum(1)  # noqa: E731
    w, o = ratio(inside + noise()), ratio(noise())
    t = (np.median(w) + np.median(o)) / 2
    counts = Counts(int((o > t).sum()), n, int((w <= t).sum()), n)
    return counts, sigma, q, steps


def test_the_true_noise_is_not_refuted_and_much_more_is():
    counts, sigma, q, steps = _sampled_scores()
    assert not refuted(counts, sigma, q, steps, 0.001)
    assert refuted(counts, 2.5 * sigma, q, steps, 0.001)


@pytest.mark.slow
def test_subsampled_curve_is_inverted():
    counts, sigma, q, steps = _sampled_scores()
    assert sigma < noise_upper(counts, q, steps, 0.05, near=sigma) < 2.2 * sigma
    truth = accounting.epsilon([(accounting.poisson(q, accounting.gaussian(sigma)), steps)], 1e-5)
    assert 0.25 * truth < epsilon_lower(counts, q, steps, 1e-5, 0.05, near=sigma) < truth
