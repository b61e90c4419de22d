"""The privacy-loss distribution of one Gaussian release, sampled or not: that of `dp_accounting`, all points of its grid at once.

`dp_accounting` inverts the privacy loss point by point in Python, which was most of the time of a calibration. The numbers here are
the same to the last bit: the same operations in the same order, on arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss


def gaussian_release(sigma: float, sampling: float, interval: float) -> PrivacyLossDistribution:
    """`from_gaussian_mechanism` of `dp_accounting` for records that are added or removed: a bound on a grid of this width."""
    remove = _on_grid(GaussianLoss(sigma, sampling_prob=sampling, adjacency_type=AdjacencyType.REMOVE), interval)
    if sampling == 1.0:
        return PrivacyLossDistribution(remove)
    add = _on_grid(GaussianLoss(sigma, sampling_prob=sampling, adjacency_type=AdjacencyType.ADD), interval)
    return PrivacyLossDistribution(remove, add)


def _on_grid(loss: GaussianLoss, interval: float) -> pld_pmf.PLDPmf:
    """δ(ε) at the points of the grid, and above it between them (connect the dots)."""
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)


class GaussianLoss(GaussianPrivacyLoss):
    """The privacy loss under noise σ of a record that is sampled with probability q, and added or removed."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """δ(ε) = P[X ≤ x] − e^ε Q[X ≤ x], where the loss at x is ε; beyond the largest and the least loss there is no such x."""
        epsilons = np.asarray(epsilon)
        if epsilons.ndim != 1:
            return super().get_delta_for_epsilon(epsilon)
        deltas, inside = np.zeros(epsilons.shape), np.ones(epsilons.shape, dtype=bool)
        if self.sampling_prob < 1 and self.adjacency_type == AdjacencyType.ADD:
            inside = epsilons < -math.log1p(-self.sampling_prob)
        elif self.sampling_prob < 1:
            inside = epsilons > math.log1p(-self.sampling_prob)
            deltas[~inside] = -np.expm1(epsilons[~inside])
        x = self._places(epsilons[inside])
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(epsilons[inside] + self.mu_lower_log_cdf(x))
        return np.clip(deltas, 0, 1)

    def _places(self, losses: np.ndarray) -> np.ndarray:
        """The x of each loss. Without sampling the loss at x is log(1 + (e^loss − 1)/q), and with the sign of both turned where
        the record is added."""
        if self.sampling_prob == 1:
            return np.asarray(self._inverse_privacy_loss_without_subsampling_remove(losses))
        rate, least = 1 / self.sampling_prob, math.log(1 - self.sampling_prob)
        added = self.adjacency_type == AdjacencyType.ADD
        signed = -losses if added else losses
        first, second = signed + np.log(rate), np.log(rate - 1)
        # at zero, and at the least loss, where e^loss − 1 = −q up to rounding, the ways of a single point are others
        apart = (signed == 0) | (signed <= least) | np.isclose(signed, least, rtol=1e-8, atol=0) | (first <= second)
        first[apart] = second + 1.0
        without = first + np.log1p(-np.exp(second - first))
        x = self._inverse_privacy_loss_without_subsampling_remove(-without if added else without)
        x = self.sensitivity + x if added else x
        for k in np.flatnonzero(apart):
            x[k] = self.inverse_privacy_loss(losses[k])
        return np.asarray(x)
