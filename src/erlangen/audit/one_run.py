"""Auditing with one training run (Steinke, Nasr and Jagielski 2023).

m canaries are each put in or left out by a fair coin. From the outcome of one run, r of them are guessed, the others passed over;
v guesses are right. If training is (ε, δ)-DP, then with q = e^ε/(1 + e^ε)

    Pr[V ≥ v] ≤ Pr[Bin(r, q) ≥ v] + 2mδ · max_{1≤i≤v} (1/i)·Σ_{j=1}^{i} Pr[Bin(r, q) = v − j]

so an ε for which the right-hand side is below α is refuted at confidence 1 − α.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import ndtr

from erlangen.audit.intervals import bisect
from erlangen.audit.verdict import CONFIDENCE, CONFIDENCES, CONSISTENT, INCONCLUSIVE, VIOLATED, Finding, level

LARGEST_EPSILON = 60.0


@dataclass(frozen=True)
class Guesses:
    """m canaries, r guesses, v of them right."""

    canaries: int
    made: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.made <= self.canaries:
            raise ValueError(f"{self} is impossible: need right ≤ made ≤ canaries")

    def p_value(self, epsilon: float, delta: float) -> float:
        """The bound at the top of this file."""
        q = 1.0 / (1.0 + math.exp(-epsilon))
        first = float(stats.binom.sf(self.right - 1, self.made, q))
        if not delta or not self.right:
            return min(1.0, first)
        mass = stats.binom.pmf(np.arange(self.right - 1, -1, -1), self.made, q)  # v−1, v−2, …, 0
        worst = float((np.cumsum(mass) / np.arange(1, self.right + 1)).max())
        return min(1.0, first + 2 * self.canaries * delta * worst)

    def epsilon_lower(self, delta: float, alpha: float) -> float:
        """The largest ε refuted at confidence 1 − α; 0 if none is."""
        if self.p_value(0.0, delta) >= alpha:
            return 0.0
        return bisect(lambda e: self.p_value(e, delta) < alpha, 0.0, LARGEST_EPSILON, 40)

    @property
    def perfect(self) -> Guesses:
        return Guesses(self.canaries, self.made, self.made)


def guess(scores: Sequence[float] | np.ndarray, included: Sequence[bool] | np.ndarray, guesses: int) -> Guesses:
    """The ``guesses``/2 highest scores are guessed in, as many lowest out. Only the counting sees ``included``."""
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    half = max(1, min(guesses, len(scores)) // 2)
    order = np.argsort(np.nan_to_num(scores), kind="stable")
    right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
    return Guesses(len(scores), 2 * half, right)


def best_guesses(canaries: int, mu: float, delta: float, alpha: float = 0.05) -> int:
    """How many guesses to make: best for Gaussian scores of separation μ, decided before any score is seen."""
    best, chosen = -1.0, canaries
    grid = np.linspace(-8, 8 + mu, 4001)
    for share in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02):
        made = 2 * max(1, int(canaries * share / 2))
        above = 0.5 * ndtr(mu - grid) + 0.5 * ndtr(-grid)  # share of all canaries with a score above the grid point
        t = grid[int(np.argmin(np.abs(above - made / 2 / canaries)))]
        accuracy = float(ndtr(mu - t) / (ndtr(mu - t) + ndtr(-t)))
        value = Guesses(canaries, made, int(made * accuracy)).epsilon_lower(delta, alpha)
        if value > best + 1e-9:
            best, chosen = value, made
    return chosen


def able_guesses(canaries: int, epsilon: float, delta: float, confidence: float) -> int | None:
    """The least number of guesses that refute (ε, δ) if all are right; None if this many canaries cannot."""
    if math.isinf(epsilon):
        return None
    able = lambda made: Guesses(canaries, made, made).p_value(epsilon, delta) < 1 - confidence  # noqa: E731
    return next((made for made in range(2, canaries + 1, 2) if able(made)), None)


def conclude_one_run(subject: str, audit: str, guesses: Guesses, epsilon: float, delta: float, facts: dict,
                     confidence: float = CONFIDENCE) -> Finding:  # fmt: skip
    """A finding against the claim (ε, δ) of the whole run."""
    levels = sorted({*CONFIDENCES, confidence})
    p = 1.0 if math.isinf(epsilon) else guesses.p_value(epsilon, delta)
    able = math.isinf(epsilon) or guesses.perfect.p_value(epsilon, delta) < 1 - confidence
    verdict = VIOLATED if p < 1 - confidence else CONSISTENT if able else INCONCLUSIVE
    option = " (--records)" if audit == "membership" else ""
    reason = {
        VIOLATED: f"{guesses.right} of {guesses.made} guesses were right, impossible at the claim (p = {p:.2g})",
        CONSISTENT: f"{guesses.right} of {guesses.made} guesses were right",
        INCONCLUSIVE: f"{guesses.made} guesses cannot refute the claim even if all are right: use more canaries{option}",
    }[verdict]
    return Finding(
        subject, audit, verdict, epsilon, delta, None,
        lower_bound={level(c): guesses.epsilon_lower(delta, 1 - c) for c in levels},
        ceiling={level(c): guesses.perfect.epsilon_lower(delta, 1 - c) for c in levels},
        p_value=p, trials=guesses.canaries, reason=reason, facts={**facts, "guesses": guesses.made, "right": guesses.right},
        confidence=confidence,
    )  # fmt: skip


__all__ = ["Guesses", "able_guesses", "best_guesses", "conclude_one_run", "guess"]
