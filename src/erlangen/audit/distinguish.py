"""From scores with and without a record to counts that are honest: everything is chosen on the pilot share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from erlangen.audit.intervals import Counts, epsilon_lower
from erlangen.audit.verdict import Evidence

PILOT = 0.2
CANDIDATES = 60
#: standard errors by which a threshold must be better than one that is better known
CAUTION = 1.5


@dataclass(frozen=True)
class Threshold:
    """Guess "there" when sign·score > sign·value."""

    value: float
    sign: float = 1.0

    def count(self, with_record: np.ndarray, without: np.ndarray) -> Counts:
        there, absent = (self.sign * x > self.sign * self.value for x in (with_record, without))
        return Counts(int(absent.sum()), len(without), int((~there).sum()), len(with_record))


def evidence(
    with_record: np.ndarray, without: np.ndarray, delta: float, alpha: float, pilot: float = PILOT
) -> Evidence:
    """Counts at both thresholds, on the trials that did not choose them."""
    w, w_rest = split(np.asarray(with_record, dtype=np.float64), pilot)
    o, o_rest = split(np.asarray(without, dtype=np.float64), pilot)
    tail = best_tail(w, o, (len(w_rest), len(o_rest)), delta, alpha)
    return Evidence(balanced(w, o).count(w_rest, o_rest), tail.count(w_rest, o_rest))


def split(scores: np.ndarray, pilot: float = PILOT) -> tuple[np.ndarray, np.ndarray]:
    """(pilot, rest); both keep at least one score."""
    if len(scores) < 2:
        raise ValueError(f"{len(scores)} trial(s) cannot both choose a threshold and be counted; give more")
    cut = min(max(1, int(len(scores) * pilot)), len(scores) - 1)
    return scores[:cut], scores[cut:]


def balanced(w: np.ndarray, o: np.ndarray) -> Threshold:
    """Halfway between the worlds, which is best for Gaussian scores; for a score of few values the cut that tells most."""
    few = np.unique(np.concatenate([w[:1000], o[:1000]]))
    if 1 < len(few) <= 16:
        cuts = (few[1:] + few[:-1]) / 2
        gaps = np.array([(w > c).mean() - (o > c).mean() for c in cuts])
        best = int(np.abs(gaps).argmax())
        return Threshold(float(cuts[best]), 1.0 if gaps[best] >= 0 else -1.0)
    return Threshold(float((np.median(w) + np.median(o)) / 2), 1.0 if np.median(w) >= np.median(o) else -1.0)


def best_tail(w: np.ndarray, o: np.ndarray, trials: tuple[int, int], delta: float, alpha: float) -> Threshold:
    """The threshold with the largest model-free ε_L on the pilot, far in a tail for small ε.

    Quantiles of either world, down to a handful of pilot trials, and either sign are candidates; pilot counts are scaled
    to the number of trials (with, without) that will be priced. A rate seen k times in the pilot is known to 1/√k:
    standard errors of the logarithm are taken off, or the luckiest of the rarest events would be chosen.
    """
    best, chosen = -math.inf, balanced(w, o)
    for sign in (1.0, -1.0):
        a, b = np.sort(sign * w), np.sort(sign * o)
        for value in _thresholds(a, b):
            missed, alarms = (
                np.searchsorted(a, value, "right") / len(a),
                1 - np.searchsorted(b, value, "right") / len(b),
            )
            scaled = Counts(round(alarms * trials[1]), trials[1], round(missed * trials[0]), trials[0])
            found = epsilon_lower(scaled, delta, alpha) - CAUTION * _uncertainty(missed, alarms, len(a), len(b))
            if found > best + 1e-9:
                best, chosen = found, Threshold(sign * value, sign)
    return chosen


def _uncertainty(missed: float, alarms: float, with_record: int, without: int) -> float:
    """One standard error of ln(TPR/FPR) or ln(TNR/FNR), whichever the threshold is for, on the pilot."""
    there, absent = (1 - missed) * with_record + 0.5, alarms * without + 0.5
    lost, kept = missed * with_record + 0.5, (1 - alarms) * without + 0.5
    upper, lower = 1 / there + 1 / absent, 1 / lost + 1 / kept
    return math.sqrt(upper if absent / without < lost / with_record else lower)


def _thresholds(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Quantiles of each world down to a handful of pilot trials, and the gap between worlds that separate."""
    least = min(0.5, 5.0 / min(len(a), len(b)))
    share = np.logspace(math.log10(least), math.log10(0.5), CANDIDATES)
    points = [*np.quantile(b, 1 - share), *np.quantile(a, share)]
    if b[-1] < a[0]:
        points.append((a[0] + b[-1]) / 2)
    return [float(p) for p in points]
