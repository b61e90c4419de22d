"""From counts to lower bounds: Clopper–Pearson limits, ε_L, μ_L, what the number of trials allows, and Holm.

An attack guesses "the record was there" when a score exceeds a threshold. Of n₁ trials with the record it missed ``fn``, of n₀
trials without it raised ``fp`` false alarms. Threshold and score were chosen on other trials, so both counts are binomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, betaincinv, gammaln, ndtr, ndtri

#: above this many trials the two limits are combined by a union bound: exact enumeration gains nothing any more
EXACT_TRIALS = 20_000
SMALLEST_P = 1e-12


@dataclass(frozen=True)
class Counts:
    """What an attack achieved on trials that had no part in choosing it."""

    fp: int
    without: int
    fn: int
    with_record: int

    def __post_init__(self) -> None:
        if not (
            0 <= self.fp <= self.without and 0 <= self.fn <= self.with_record and self.without and self.with_record
        ):
            raise ValueError(f"counts {self} are impossible: errors must lie between 0 and a positive number of trials")

    @property
    def perfect(self) -> Counts:
        """The best that the same number of trials could have shown."""
        return Counts(0, self.without, 0, self.with_record)


def upper_limit(hits: int, trials: int, alpha: float) -> float:
    """Clopper–Pearson: the true rate exceeds this with probability at most α."""
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - alpha))


def lower_limit(hits: int, trials: int, alpha: float) -> float:
    """Clopper–Pearson: the true rate is below this with probability at most α."""
    return 0.0 if hits <= 0 else float(betaincinv(hits, trials - hits + 1, alpha))


def epsilon_lower(counts: Counts, delta: float, alpha: float) -> float:
    """Model-free ε_L: (ε, δ)-DP with a smaller ε is refuted at confidence 1 − α. Never negative.

    DP bounds TPR ≤ e^ε·FPR + δ and, for the complementary guess, TNR ≤ e^ε·FNR + δ. Both use the same two rates, each with
    its limit at α/2, so that the larger of the two bounds holds at 1 − α.
    """
    fpr, fnr = upper_limit(counts.fp, counts.without, alpha / 2), upper_limit(counts.fn, counts.with_record, alpha / 2)
    bounds = [math.log((1 - a - delta) / b) for a, b in ((fnr, fpr), (fpr, fnr)) if 1 - a - delta > 0 and b > 0]
    return max([0.0, *bounds])


def gdp_lower(counts: Counts, alpha: float) -> float:
    """μ_L: μ-GDP with a smaller μ is refuted at confidence 1 − α. Never negative.

    μ = Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) for the two true rates. Up to `EXACT_TRIALS` the joint distribution of both counts is
    enumerated (`gdp_refuted`); beyond, each rate gets its own limit at α/2.
    """
    if max(counts.without, counts.with_record) > EXACT_TRIALS:
        fpr, fnr = (
            upper_limit(counts.fp, counts.without, alpha / 2),
            upper_limit(counts.fn, counts.with_record, alpha / 2),
        )
        return max(0.0, float(ndtri(1 - fpr) - ndtri(fnr))) if max(fpr, fnr) < 1 else 0.0
    if not gdp_refuted(counts, 0.0, alpha):
        return 0.0
    high = _estimate(counts.fp, counts.without) + _estimate(counts.fn, counts.with_record) + 1.0
    return bisect(lambda mu: gdp_refuted(counts, mu, alpha), 0.0, float(high), 20)


def gdp_refuted(counts: Counts, mu: float, alpha: float) -> bool:
    """Whether these counts refute μ-GDP at confidence 1 − α.

    Counts are ordered by T = z(fp) + z(fn), z(k) = Φ⁻¹(1 − (k+½)/(n+1)). On the boundary of the hypothesis FPR = Φ(−a) and
    FNR = Φ(a − μ); inside it an error rate is larger, hence T smaller. The nuisance a is searched over its own confidence set
    of level 1 − α/20, and the test has what is left of α (Berger and Boos 1994).
    """
    if max(counts.without, counts.with_record) > EXACT_TRIALS:
        return gdp_lower(counts, alpha) > mu
    t = float(_estimate(counts.fp, counts.without) + _estimate(counts.fn, counts.with_record))
    spent = alpha / 20
    least = float(-ndtri(max(upper_limit(counts.fp, counts.without, spent / 2), 1e-300)))
    most = float(-ndtri(max(lower_limit(counts.fp, counts.without, spent / 2), 1e-12)))
    tail = [
        _exceeds(t, a, mu, counts.without, counts.with_record)
        for a in np.linspace(max(least, -8.0), min(most, 8.0), 25)
    ]
    return max(tail) <= alpha - spent


def _estimate(k: int | np.ndarray, n: int) -> float | np.ndarray:
    return ndtri(1.0 - (np.asarray(k) + 0.5) / (n + 1.0))


def _exceeds(t: float, a: float, mu: float, n0: int, n1: int) -> float:
    """Pr[T ≥ t] for fp ~ Bin(n₀, Φ(−a)), fn ~ Bin(n₁, Φ(a − μ)): a sum over fp of the distribution of fn."""
    p0, p1 = float(ndtr(-a)), float(ndtr(a - mu))
    spread = 12 * math.sqrt(n0 * p0 * (1 - p0)) + 12
    k = np.arange(max(0, math.floor(n0 * p0 - spread)), min(n0, math.ceil(n0 * p0 + spread)) + 1)
    log_mass = gammaln(n0 + 1) - gammaln(k + 1) - gammaln(n0 - k + 1) + k * np.log(p0) + (n0 - k) * np.log1p(-p0)
    most = np.floor((n1 + 1) * ndtr(_estimate(k, n0) - t) - 0.5 + 1e-9)
    tail = np.where(most < 0, 0.0, bdtr(np.clip(most, 0, n1), n1, p1))
    return float(np.exp(log_mass) @ tail)


def p_value(refuted_at: Callable[[float], bool]) -> float:
    """The smallest α at which a monotone test refutes; 1 if it never does."""
    if not refuted_at(0.5):
        return 1.0
    if refuted_at(SMALLEST_P):
        return SMALLEST_P
    low, high = math.log(SMALLEST_P), math.log(0.5)
    return math.exp(bisect(lambda x: not refuted_at(math.exp(x)), low, high, 40) + 1e-9)


def bisect(below: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The last point found with ``below``; ``below(low)`` is taken for granted."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below α keeps the chance of any false rejection below α."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def noise_upper_limit(scores: np.ndarray, alpha: float = 0.05) -> float:
    """σ_U = √((T−1)s²/χ²_{α,T−1}): the noise of Gaussian scores is larger with probability at most α."""
    from scipy.stats import chi2

    scores = np.asarray(scores, dtype=np.float64)
    if scores.size < 2:
        raise ValueError(f"{scores.size} score(s) have no variance; give at least 2")
    return float(math.sqrt((scores.size - 1) * scores.var(ddof=1) / chi2.ppf(alpha, scores.size - 1)))
