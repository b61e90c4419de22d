"""What ε means: the best attacker's power, and the Gaussian mechanism with the same guarantee."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from .epsilon import AccountingError, Neighbouring, _check, _curve, _gaussian, epsilon
from .normal import Normal, normalise

if TYPE_CHECKING:
    from .normal import Events


def tradeoff(events: Events, fpr: float, neighbouring: Neighbouring = "add-or-remove-one") -> float:
    """Largest true-positive rate of any attacker whose false-positive rate is at most `fpr`.

    The attacker knows everything but whether one unit's data was used. From the hockey-stick curve δ(ε) of the PLD,
    taken as the larger of the two neighbour directions, so that it bounds attackers of either direction:

        TPR ≤ min over ε ≥ 0 of  e^ε·FPR + δ(ε)  and  1 − e^(−ε)(1 − FPR − δ(ε)).
    """
    _check(0.5, "pld", neighbouring)
    if not 0 <= fpr <= 1:
        raise AccountingError(f"fpr = {fpr} is not a rate between 0 and 1")
    normal = normalise(events)
    if normal is None:
        return 1.0
    if not normal:
        return float(fpr)
    return _tradeoff(normal, float(fpr), neighbouring)


def gdp_mu(events: Events, delta: float, neighbouring: Neighbouring = "add-or-remove-one") -> float:
    """μ of the Gaussian mechanism (sensitivity / noise std) whose ε at `delta` is that of the events by PLD."""
    value = epsilon(events, delta, "pld", neighbouring)
    if value == math.inf:
        return math.inf
    if not normalise(events):
        return 0.0
    return mu_of(value, float(delta))


@lru_cache(maxsize=1024)
def _tradeoff(normal: Normal, fpr: float, neighbouring: Neighbouring) -> float:
    curve = _curve(normal, "pld", neighbouring)
    # Both bounds are convex (in e^ε and e^−ε): a golden-section search finds the least, and any ε gives a valid bound.
    # Beyond the ε at which δ is negligible neither bound improves.
    top = next((e for e in map(curve.epsilon, (1e-10, 1e-8, 1e-6)) if e < math.inf), None)
    if top is None:
        return 1.0
    top = max(top, 1e-6)
    below = _minimise(lambda e: math.exp(min(e, 700.0)) * fpr + float(curve.delta(e)), top)
    above = _minimise(lambda e: 1 - math.exp(-e) * (1 - fpr - float(curve.delta(e))), top)
    return float(min(1.0, max(min(below, above), fpr)))


def _minimise(f: Callable[[float], float], top: float, iterations: int = 60) -> float:
    """Least value found of a unimodal `f` on [0, top]."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = 0.0, top
    best = min(f(low), f(high))
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(iterations):
        best = min(best, fa, fb)
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = f(b)
        if high - low < 1e-7 * max(1.0, top):
            break
    return min(best, fa, fb)


@lru_cache(maxsize=1024)
def mu_of(eps: float, delta: float) -> float:
    """μ of the Gaussian mechanism that is (ε, δ)-private, δ_μ(ε) = δ: the curve rises with μ, so bisect, keeping the larger end."""
    low, high = 0.0, 1.0
    while _gaussian(1 / high).delta(eps) < delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _gaussian(1 / middle).delta(eps) < delta:
            low = middle
        else:
            high = middle
    return high
