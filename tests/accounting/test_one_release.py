"""One release on a grid: what `dp_accounting` computes point by point, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from erlangen.accounting.one_release import GaussianLoss, gaussian_release

RATES = (1e-9, 1e-6, 0.01, 0.1234, 0.5, 0.999, 1.0)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 3.7, 50.0, 1e4])
@pytest.mark.parametrize("rate", RATES)
def test_every_probability_is_the_same(sigma, rate):
    interval = 1e-3 if sigma >= 0.5 else 1e-2
    ours = gaussian_release(sigma, rate, interval)
    theirs = from_gaussian_mechanism(sigma, value_discretization_interval=interval, sampling_prob=rate)
    for side in ("_pmf_remove", "_pmf_add"):
        a, b = (getattr(found, side).to_dense_pmf() for found in (ours, theirs))
        assert np.array_equal(a._probs, b._probs)
        assert (a._lower_loss, a._infinity_mass) == (b._lower_loss, b._infinity_mass)
    for steps in (1, 30):
        assert ours.self_compose(steps).get_epsilon_for_delta(1e-5) == theirs.self_compose(steps).get_epsilon_for_delta(1e-5)


@pytest.mark.parametrize("side", [AdjacencyType.ADD, AdjacencyType.REMOVE])
@pytest.mark.parametrize("rate", RATES[:-1])
def test_so_it_is_where_no_loss_is_larger_or_less(side, rate):
    """At the ends of the loss, and within rounding of them, points go ways of their own."""
    end = np.log1p(-rate) * (1 if side == AdjacencyType.REMOVE else -1)
    points = end * np.array([1, 1 - 1e-16, 1 + 1e-16, 1 - 1e-10, 1 + 1e-10, 1 - 5e-9, 1 + 5e-9, 0.5, 2, 0, -1])
    ours, theirs = (kind(0.8, sampling_prob=rate, adjacency_type=side) for kind in (GaussianLoss, GaussianPrivacyLoss))

    def found(loss, values):
        try:
            return loss.get_delta_for_epsilon(values)
        except ValueError as error:
            return str(error)

    for point in points:
        assert found(ours, np.array([point])) == found(theirs, np.array([point])), point / end
        assert found(ours, float(point)) == found(theirs, float(point))


def test_what_cannot_be_resolved_is_refused_in_the_same_words():
    with pytest.raises(ValueError) as theirs:
        from_gaussian_mechanism(0.3, value_discretization_interval=1e-3, sampling_prob=1 - 1e-12)
    with pytest.raises(ValueError) as ours:
        gaussian_release(0.3, 1 - 1e-12, 1e-3)
    assert str(ours.value) == str(theirs.value)
