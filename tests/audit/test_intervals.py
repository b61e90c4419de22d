"""Bounds from counts: coverage by simulation, closed forms, ceilings, Holm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from erlangen import accounting
from erlangen.audit.distinguish import evidence
from erlangen.audit.intervals import (
    Counts,
    epsilon_lower,
    gdp_lower,
    gdp_refuted,
    holm,
    lower_limit,
    noise_upper_limit,
    p_value,
    upper_limit,
)
from erlangen.audit.verdict import (
    CONSISTENT,
    INCONCLUSIVE,
    VIOLATED,
    Claim,
    Evidence,
    conclude,
    corrected,
    failed,
    gaussian_epsilon,
)


@settings(max_examples=60, deadline=None)
@given(trials=st.integers(1, 400), share=st.floats(0, 1), alpha=st.sampled_from((0.2, 0.05, 0.001)))
def test_clopper_pearson_inverts_the_binomial(trials, share, alpha):
    hits = round(share * trials)
    high, low = upper_limit(hits, trials, alpha), lower_limit(hits, trials, alpha)
    assert low <= hits / trials <= high
    if hits < trials:
        assert stats.binom.cdf(hits, trials, high) == pytest.approx(alpha, rel=1e-6)
    if hits:
        assert stats.binom.sf(hits - 1, trials, low) == pytest.approx(alpha, rel=1e-6)


def test_model_free_bound_and_its_ceiling():
    perfect = Counts(0, 6000, 0, 6000)
    # all right: the false-positive limit at α/2 is 1 − (α/2)^(1/n) ≈ ln(2/α)/n
    assert epsilon_lower(perfect, 1e-5, 0.001) == pytest.approx(math.log(6000 / math.log(2000)), abs=2e-2)
    assert epsilon_lower(Counts(3000, 6000, 3000, 6000), 1e-5, 0.05) == 0.0
    assert epsilon_lower(Counts(0, 10, 10, 10), 0.0, 0.05) >= 0.0
    # the guess may be wrong more often than right: the complementary statement tells as much
    assert epsilon_lower(Counts(10, 1000, 500, 1000), 0, 0.05) == epsilon_lower(Counts(500, 1000, 10, 1000), 0, 0.05)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.5])
def test_gdp_bound_covers_at_its_stated_rate_at_any_threshold(mu, shift):
    rng, n, repeats, alpha = np.random.default_rng(int(10 * mu + 7)), 150, 600, 0.05
    t = mu / 2 + shift
    pairs = np.stack([rng.binomial(n, ndtr(-t), repeats), rng.binomial(n, ndtr(t - mu), repeats)], 1)
    wrong = 0
    for (fp, fn), count in zip(*np.unique(pairs, axis=0, return_counts=True)):
        if gdp_refuted(Counts(int(fp), n, int(fn), n), mu, alpha):
            wrong += count
    assert wrong <= stats.binom.ppf(0.9999, repeats, alpha)


def test_gdp_bound_is_consistent_with_its_own_test_and_grows_with_evidence():
    counts = Counts(20, 300, 30, 300)
    mu = gdp_lower(counts, 0.05)
    assert gdp_refuted(counts, mu * 0.999, 0.05)
    assert not gdp_refuted(counts, mu * 1.01, 0.05)
    assert gdp_lower(Counts(200, 3000, 300, 3000), 0.05) > mu > gdp_lower(counts, 0.001)
    # at many trials limits are combined by a union bound, and must still be near the truth
    n = 200_000
    far = gdp_lower(Counts(round(n * ndtr(-0.5)), n, round(n * ndtr(-0.5)), n), 0.05)
    assert 0.97 < far < 1.0


def test_power_at_known_epsilon():
    """Median bounds of 20 repetitions with 1000 runs in each world, at 95 %."""
    rng = np.random.default_rng(5)
    for epsilon, least in ((1.0, 0.40), (2.0, 1.3), (4.0, 3.2), (8.0, 6.9)):
        mu = 1 / accounting.noise_multiplier(epsilon, 1e-5, 1.0, 1)
        found = []
        for _ in range(20):
            seen = evidence(rng.normal(mu, 1, 1000), rng.normal(0, 1, 1000), 1e-5, 0.05)
            found.append(gaussian_epsilon(gdp_lower(seen.balanced, 0.05), 1e-5))
        assert np.median(found) >= least, (epsilon, np.median(found))


def test_p_value_is_where_the_test_flips():
    assert p_value(lambda a: a > 0.013) == pytest.approx(0.013, rel=1e-3)
    assert p_value(lambda a: False) == 1.0
    assert p_value(lambda a: True) <= 1e-11


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_between_the_raw_value_and_bonferroni(p):
    adjusted = holm(p)
    order = np.argsort(p)
    assert all(a >= x for a, x in zip(adjusted, p))
    assert all(a <= min(1.0, len(p) * x) + 1e-12 or a == max(adjusted) or a <= 1 for a, x in zip(adjusted, p))
    assert np.all(np.diff(np.array(adjusted)[order]) >= -1e-12)
    assert adjusted[order[0]] == pytest.approx(min(1.0, len(p) * p[order[0]]))


def test_noise_upper_limit_covers():
    rng = np.random.default_rng(0)
    misses = sum(noise_upper_limit(rng.normal(0, 2.0, 40)) < 2.0 for _ in range(2000))
    assert misses / 2000 < 0.065


def _sound(sigma: float, n: int, rng: np.random.Generator) -> Evidence:
    return evidence(rng.normal(1 / sigma, 1, n), rng.normal(0, 1, n), 1e-5, 0.001)


def test_verdicts():
    rng, claim = np.random.default_rng(1), Claim.of(accounting.gaussian(1.0), 1e-5)
    assert conclude("x", "a", _sound(1.0, 3000, rng), claim).verdict == CONSISTENT
    assert conclude("x", "a", _sound(0.6, 3000, rng), claim).verdict == VIOLATED
    few = conclude("x", "a", _sound(1.0, 6, rng), claim)
    assert few.verdict == INCONCLUSIVE
    assert few.gdp_ceiling["99.9%"] < claim.epsilon
    nothing = Claim.of(accounting.non_private("test"), 1e-5)
    assert conclude("x", "a", _sound(0.01, 3000, rng), nothing).verdict == CONSISTENT


def test_a_claim_of_epsilon_alone_and_a_subsampled_event():
    rng = np.random.default_rng(2)
    assert conclude("x", "a", _sound(0.2, 3000, rng), Claim(1.0, 1e-5)).verdict == VIOLATED
    event = accounting.poisson(0.1, accounting.gaussian(1.0))
    mixed = rng.normal(0, 1, 20000) + (rng.random(20000) < 0.1)
    assert (
        conclude("x", "a", evidence(mixed, rng.normal(0, 1, 20000), 1e-5, 0.001), Claim.of(event, 1e-5)).verdict
        == CONSISTENT
    )
    always = evidence(rng.normal(1, 1, 20000), rng.normal(0, 1, 20000), 1e-5, 0.001)
    assert conclude("x", "a", always, Claim.of(event, 1e-5)).verdict == VIOLATED


def test_many_audits_are_corrected_but_certainties_stand():
    unlucky = failed("x", "a", "luck", p=0.0009)
    alone, table = corrected([unlucky]), corrected([unlucky] * 1 + [failed("y", "a", "no", p=0.5)] * 20)
    assert alone[0].verdict == VIOLATED
    assert table[0].verdict == CONSISTENT
    assert corrected([failed("x", "flow", "proved")] * 30)[0].verdict == VIOLATED


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="impossible"):
        Counts(5, 4, 0, 4)
