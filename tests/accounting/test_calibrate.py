"""σ from ε, steps from ε, budgets: the answers are checked with the accountant, and are tight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import erlangen.accounting as acc


def cost(q, sigma, steps, delta, method="pld"):
    return acc.epsilon([(acc.poisson(q, acc.gaussian(sigma)), steps)], delta, method)


@pytest.mark.parametrize(
    ("target", "sigma"), [(1, 30.8), (2, 16.4), (3, 11.4), (4, 8.87), (6, 6.27), (8, 4.93)]
)
def test_published_noise_multipliers(target, sigma):
    """The equivariant paper's schedule: 2160 steps at q = 8192/50000, by RDP."""
    found = acc.noise_multiplier(target, 1e-5, 8192 / 50000, 2160, "rdp")
    assert found == pytest.approx(sigma, rel=4e-3)


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps"),
    [(2.0, 1e-5, 0.01, 1000), (8.0, 1e-5, 0.16384, 2160), (0.05, 1e-6, 0.01, 50), (1.0, 1e-5, 1.0, 1)],
)
def test_noise_is_enough_and_tight(target, delta, q, steps):
    sigma = acc.noise_multiplier(target, delta, q, steps)
    assert cost(q, sigma, steps, delta) <= target
    assert cost(q, sigma / 1.001, steps, delta) > target


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(target=st.floats(0.3, 6.0), q=st.floats(0.01, 0.5), steps=st.integers(1, 300))
def test_calibration_round_trip(target, q, steps):
    sigma = acc.noise_multiplier(target, 1e-5, q, steps)
    assert cost(q, sigma, steps, 1e-5) <= target
    assert cost(q, sigma / 1.001, steps, 1e-5) > target
    assert acc.max_steps(target, 1e-5, q, sigma) >= steps


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_max_steps_is_exact(method):
    n = acc.max_steps(2.0, 1e-5, 0.01, 1.0, method)
    assert cost(0.01, 1.0, n, 1e-5, method) <= 2.0 < cost(0.01, 1.0, n + 1, 1e-5, method)


def test_composite_mechanisms_calibrate():
    """GReDP's complex reading really has σ/√2: its σ must come out √2 larger."""
    plain = acc.noise_multiplier(3.0, 1e-5, 0.05, 100)
    halved = acc.noise_multiplier(3.0, 1e-5, 0.05, 100, make_event=lambda s: acc.gaussian(s / math.sqrt(2)))
    assert halved == pytest.approx(math.sqrt(2) * plain, rel=2e-3)


def test_impossible_targets_are_named():
    with pytest.raises(acc.AccountingError, match="cannot be reached"):
        acc.noise_multiplier(1.0, 1e-5, 0.1, 10, make_event=lambda s: acc.non_private("released exactly"))
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(acc.AccountingError, match="target_epsilon"):
            acc.noise_multiplier(target, 1e-5, 0.1, 10)
        with pytest.raises(acc.AccountingError, match="target_epsilon"):
            acc.max_steps(target, 1e-5, 0.1, 1.0)
    with pytest.raises(ValueError, match="steps"):
        acc.noise_multiplier(1.0, 1e-5, 0.1, 0)
    with pytest.raises(acc.AccountingError, match="delta"):
        acc.noise_multiplier(1.0, 2.0, 0.1, 10)
    assert acc.max_steps(0.1, 1e-5, 0.5, 0.5) == 0
    assert acc.max_steps(1.0, 1e-5, 0.5, 0.0) == 0


def test_budget_counts_the_past():
    step = acc.poisson(0.02, acc.gaussian(1.0))
    budget = acc.Budget(2.0, 1e-5)
    fresh = budget.steps_left(step)
    past = [(acc.poisson(0.05, acc.gaussian(1.2)), 20)]
    left = budget.steps_left(step, past)
    assert 0 < left < fresh
    assert budget.spent([*past, (step, left)]) <= 2.0 < budget.spent([*past, (step, left + 1)])
    assert budget.allows(step, past, left)
    assert not budget.allows(step, past, left + 1)
    assert budget.steps_left(step, [(step, fresh)]) == 0
    assert budget.steps_left(step, [(acc.non_private("x"), 1)]) == 0
    assert budget.steps_left(acc.no_op()) >= 10**8
