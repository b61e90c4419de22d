"""From scores with and without a record to counts that are honest: everything is chosen on the pilot share."""

from __future__ import annotations

import math

import numpy as np

from erlangen.audit.intervals import Counts, epsilon_lower
from erlangen.audit.verdict import Evidence

PILOT = 0.2
CANDIDATES = 60


def evidence(with_record: np.ndarray, without: np.ndarray, delta: float, alpha: float, pilot: float = PILOT) -> Evidence:
    """Counts at both thresholds, each on the trials that did not choose it."""
    with_record, without = np.asarray(with_record, dtype=np.float64), np.asarray(without, dtype=np.float64)
    return Evidence(
        balanced_counts(with_record, without, pilot), tail_counts(with_record, without, delta, alpha, pilot)
    )


def split(scores: np.ndarray, pilot: float = PILOT) -> tuple[np.ndarray, np.ndarray]:
    """(pilot, rest); both halves keep at least one score."""
    cut = min(max(1, int(len(scores) * pilot)), len(scores) - 1)
    return scores[:cut], scores[cut:]


def balanced_counts(with_record: np.ndarray, without: np.ndarray, pilot: float = PILOT) -> Counts:
    """At the threshold halfway between the worlds, which is best for Gaussian scores. The sign is chosen too."""
    (w, w_rest), (o, o_rest) = split(with_record, pilot), split(without, pilot)
    sign = 1.0 if np.median(w) >= np.median(o) else -1.0
    threshold = (np.median(w) + np.median(o)) / 2
    return count(w_rest, o_rest, threshold, sign)


def tail_counts(with_record: np.ndarray, without: np.ndarray, delta: float, alpha: float, pilot: float = PILOT) -> Counts:
    """At the threshold with the largest model-free ε_L on the pilot share, far in a tail for small ε.

    Quantiles of either world, down to a handful of pilot trials, and either sign are candidates; pilot counts are scaled
    to the number of trials that will be priced.
    """
    (w, w_rest), (o, o_rest) = split(with_record, pilot), split(without, pilot)
    best, chosen = -math.inf, (float(np.median(o)), 1.0)
    for sign in (1.0, -1.0):
        a, b = np.sort(sign * w), np.sort(sign * o)
        for threshold in _thresholds(a, b):
            hits, alarms = len(a) - np.searchsorted(a, threshold, "right"), len(b) - np.searchsorted(b, threshold, "right")
            missed = (len(a) - hits) / len(a)
            scaled = Counts(round(alarms / len(b) * len(o_rest)), len(o_rest), round(missed * len(w_rest)), len(w_rest))
            value = epsilon_lower(scaled, delta, alpha)
            if value > best + 1e-9:
                best, chosen = value, (float(sign * threshold), sign)
    return count(w_rest, o_rest, *chosen)


def _thresholds(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Quantiles of each world down to a handful of pilot trials, and the gap between worlds that separate."""
    least = min(0.5, 5.0 / min(len(a), len(b)))
    share = np.logspace(math.log10(least), math.log10(0.5), CANDIDATES)
    points = [*np.quantile(b, 1 - share), *np.quantile(a, share)]
    if b[-1] < a[0]:
        points.append((a[0] + b[-1]) / 2)
    return [float(p) for p in points]


def count(with_record: np.ndarray, without: np.ndarray, threshold: float, sign: float = 1.0) -> Counts:
    """Errors of the guess "there" when sign·score > sign·threshold. A score that is not a number counts as no signal."""
    there, absent = sign * with_record > sign * threshold, sign * without > sign * threshold
    return Counts(int(absent.sum()), len(without), int((~there).sum()), len(with_record))
