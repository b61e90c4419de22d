"""A budget: how many more releases fit under (ε, δ), given everything released so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .epsilon import AccountingError, Method, Neighbouring, epsilon
from .events import MAX_COUNT

if TYPE_CHECKING:
    from dp_accounting import DpEvent

UNLIMITED = MAX_COUNT // 2
"""Answer of `steps_left` for an event that costs nothing."""


@dataclass(frozen=True)
class Budget:
    """At most `target_epsilon` at `delta`, by `method`."""

    target_epsilon: float
    delta: float
    method: Method = "pld"
    neighbouring: Neighbouring = "add-or-remove-one"

    def __post_init__(self) -> None:
        if not 0 < self.target_epsilon < math.inf:
            raise AccountingError(f"target_epsilon = {self.target_epsilon} must be a finite number above 0")
        epsilon([], self.delta, self.method, self.neighbouring)  # checks delta, method and relation

    def spent(self, history: Sequence[tuple[DpEvent, int]]) -> float:
        """ε of the history."""
        return epsilon(list(history), self.delta, self.method, self.neighbouring)

    def allows(self, event: DpEvent, history: Sequence[tuple[DpEvent, int]], steps: int = 1) -> bool:
        """Whether `steps` more releases of `event` keep the total within the budget."""
        return self.spent([*history, (event, steps)]) <= self.target_epsilon

    def steps_left(self, event: DpEvent, history: Sequence[tuple[DpEvent, int]] = ()) -> int:
        """Largest n such that `history` followed by n releases of `event` costs at most the target.

        Exact: n fits and n + 1 does not. Training asks before it starts and stops *before* step n + 1.
        """
        past = list(history)
        cost = {n: self.spent([*past, (event, n)]) for n in (0, 1)}
        if max(cost.values()) > self.target_epsilon:
            return 0
        low, high = 1, self._first_guess(event, past)
        growth = 1.05 if high > 2 else 4.0
        while self._cost(cost, event, past, high) <= self.target_epsilon:
            low, high = high, max(high + 1, int(high * growth))
            growth = min(growth * growth, 1000.0)
            if high >= UNLIMITED:
                return UNLIMITED
        return self._close(cost, event, past, low, high)

    def _first_guess(self, event: DpEvent, past: list[tuple[DpEvent, int]]) -> int:
        """A number of steps near the answer: the RDP accountant's (cheap, and slightly too small for PLD)."""
        if self.method == "rdp" or self.neighbouring != "add-or-remove-one":
            return 2
        try:
            by_rdp = Budget(self.target_epsilon, self.delta, "rdp", self.neighbouring)
            return max(2, by_rdp.steps_left(event, past))
        except AccountingError:
            return 2

    def _cost(self, known: dict[int, float], event: DpEvent, past: list[tuple[DpEvent, int]], steps: int) -> float:
        if steps not in known:
            known[steps] = self.spent([*past, (event, steps)])
        return known[steps]

    def _close(
        self, cost: dict[int, float], event: DpEvent, past: list[tuple[DpEvent, int]], low: int, high: int
    ) -> int:
        """Close the bracket (`low` fits, `high` does not) by interpolation, bisecting every third time."""
        for turn in itertools.count():
            if high - low <= 1:
                return low
            below, above = self._cost(cost, event, past, low), self._cost(cost, event, past, high)
            if turn % 3 == 2 or not below < above < math.inf:
                middle = (low + high) // 2
            else:
                middle = low + round((high - low) * (self.target_epsilon - below) / (above - below))
                middle += turn % 3  # first on one side of the crossing, then on the other
            middle = min(max(middle, low + 1), high - 1)
            if self._cost(cost, event, past, middle) <= self.target_epsilon:
                low = middle
            else:
                high = middle
        raise AssertionError  # unreachable: the loop above only ends by returning
