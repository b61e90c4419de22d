"""The trade-off curve of events, tabulated once: how many true positives any attacker can have at a false-positive rate.

TPR ≤ e^ε·FPR + δ(ε) and TPR ≤ 1 − e^(−ε)(1 − FPR − δ(ε)) for *every* ε, so the least over a table of ε is a valid bound; it is
the curve itself up to the spacing of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from erlangen import accounting

POINTS = 48


@dataclass(frozen=True)
class Curve:
    epsilons: np.ndarray
    deltas: np.ndarray

    @classmethod
    def of(cls, events: Any) -> Curve:
        """From an event, or (event, count) pairs."""
        top = accounting.epsilon(events, 1e-9)
        if math.isinf(top):
            return cls(np.zeros(1), np.ones(1))
        epsilons = np.concatenate([[0.0], np.geomspace(max(top, 1e-6) / 500, max(top, 1e-6), POINTS)])
        return cls(epsilons, np.array([accounting.delta(events, float(e)) for e in epsilons]))

    def most(self, fpr: float) -> float:
        """Largest true-positive rate."""
        above = np.exp(np.minimum(self.epsilons, 700.0)) * fpr + self.deltas
        below = 1 - np.exp(-self.epsilons) * (1 - fpr - self.deltas)
        return float(min(1.0, above.min(), below.min()))

    def allows(self, fpr: float, fnr: float) -> bool:
        """Whether an attacker of either world can have error rates as small as these."""
        return 1 - fnr <= self.most(fpr) and 1 - fpr <= self.most(fnr)
