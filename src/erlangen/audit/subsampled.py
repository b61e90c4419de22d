"""From error rates over a whole run to its noise: the privacy curve of T Poisson-sampled releases, inverted.

The attacker of one canary decides from all steps of a run whether it was in the data at all; at each step it then took part with
probability q. Its error rates lie on the trade-off curve of the *composed, subsampled* mechanism, not of a Gaussian; the
largest noise multiplier whose curve allows them is σ_U, and ε at σ_U is the lower bound.
"""

from __future__ import annotations

import math
from functools import lru_cache

from erlangen import accounting
from erlangen.audit.curve import Curve
from erlangen.audit.intervals import Counts, upper_limit


@lru_cache(maxsize=256)
def _curve(sigma: float, rate: float, steps: int) -> Curve:
    return Curve.of([(accounting.poisson(rate, accounting.gaussian(sigma)), steps)])


def refuted(counts: Counts, sigma: float, rate: float, steps: int, alpha: float) -> bool:
    """Whether noise multiplier σ cannot have produced these error rates, at confidence 1 − α."""
    fpr, fnr = upper_limit(counts.fp, counts.without, alpha / 2), upper_limit(counts.fn, counts.with_record, alpha / 2)
    return not _curve(sigma, rate, steps).allows(fpr, fnr)


def noise_upper(counts: Counts, rate: float, steps: int, alpha: float, near: float) -> float:
    """σ_U, to 3 %: every larger multiplier is refuted. ∞ where none up to 8·``near`` is; never below ``near``/4."""
    low, high = near / 4, near * 8
    if not refuted(counts, high, rate, steps, alpha):
        return math.inf
    while high / low > 1.03:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(counts, middle, rate, steps, alpha) else (middle, high)
    return high


def epsilon_lower(counts: Counts, rate: float, steps: int, delta: float, alpha: float, near: float) -> float:
    """ε_L of the run if it is Poisson-sampled Gaussian releases: refuted is every smaller ε. ``near`` is the claimed σ."""
    sigma = noise_upper(counts, rate, steps, alpha, near)
    if math.isinf(sigma):
        return 0.0
    return accounting.epsilon([(accounting.poisson(rate, accounting.gaussian(sigma)), steps)], delta)
