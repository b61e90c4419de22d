"""How much noise, how many steps: the inverse questions.

Both answers are checked with the accountant itself: the σ or T returned satisfies ε ≤ target, whatever the search did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .epsilon import AccountingError, Method, Neighbouring, epsilon
from .events import _count, gaussian, poisson

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MakeEvent = Callable[[float], "DpEvent"]

_SMALLEST, _LARGEST = 1e-3, 1e7
_TIGHT = 1e-3


def noise_multiplier(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    method: Method = "pld",
    make_event: MakeEvent | None = None,
    neighbouring: Neighbouring = "add-or-remove-one",
) -> float:
    """Smallest σ, to 0.1 %, with ε ≤ `target_epsilon` after `steps` Poisson-sampled releases of `make_event(σ)`.

    `make_event` gives the un-amplified event of one step (default: one Gaussian of multiplier σ); its ε must fall as
    σ grows. The returned σ really satisfies the target.
    """
    _check_target(target_epsilon)
    n = _count(steps, "steps", least=1)
    make = gaussian if make_event is None else make_event

    def cost(sigma: float, by: Method) -> float:
        return epsilon([(poisson(sample_rate, make(sigma)), n)], delta, by, neighbouring)

    guess = _bracket_by_rdp(cost, target_epsilon) if neighbouring == "add-or-remove-one" else 1.0
    return _smallest_sigma(lambda sigma: cost(sigma, method) <= target_epsilon, guess, target_epsilon)


def max_steps(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    noise_multiplier: float,
    method: Method = "pld",
    make_event: MakeEvent | None = None,
    neighbouring: Neighbouring = "add-or-remove-one",
) -> int:
    """Largest number of steps T with ε(T) ≤ `target_epsilon`: exact, ε(T+1) exceeds it. 0 if one step is too many."""
    from .budget import Budget

    make = gaussian if make_event is None else make_event
    budget = Budget(target_epsilon, delta, method, neighbouring)
    return budget.steps_left(poisson(sample_rate, make(noise_multiplier)), history=())


def _bracket_by_rdp(cost: Callable[[float, Method], float], target: float) -> float:
    """A σ near the answer from the cheap accountant (it is loose, so this is only where the search starts)."""
    try:
        low, high = 0.05, 1.0
        while cost(high, "rdp") > target and high < _LARGEST:
            low, high = high, high * 2
        for _ in range(12):
            middle = math.sqrt(low * high)
            if cost(middle, "rdp") <= target:
                high = middle
            else:
                low = middle
        return high
    except AccountingError:
        return 1.0


def _smallest_sigma(fits: Callable[[float], bool], guess: float, target: float) -> float:
    """Bisection in log σ from `guess`, first widening a bracket by growing factors."""
    factor = 1.05
    if fits(guess):
        high, low = guess, guess / factor
        while low > _SMALLEST and fits(low):
            factor *= factor
            high, low = low, low / factor
        if low <= _SMALLEST:
            return high
    else:
        low, high = guess, guess * factor
        while not fits(high):
            factor *= factor
            low, high = high, high * factor
            if high > _LARGEST:
                raise AccountingError(
                    f"target_epsilon = {target} cannot be reached by any noise up to σ = {_LARGEST:g}; "
                    "use a larger epsilon or delta, or fewer steps"
                )
    while high / low > 1 + _TIGHT / 4:
        middle = math.sqrt(low * high)
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise AccountingError(f"target_epsilon = {target} must be a finite number above 0")
