"""How much noise, how many steps: the inverse questions.

Both answers are checked with the accountant itself: the σ or T returned satisfies ε ≤ target, whatever the search did.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .epsilon import AccountingError, Method, Neighbouring, epsilon
from .events import _count, gaussian, poisson
from .words import upper

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
    history: Sequence[tuple[DpEvent, int]] = (),
) -> float:
    """Smallest σ, to 0.1 %, with ε ≤ `target_epsilon` after `steps` Poisson-sampled releases of `make_event(σ)`.

    `make_event` gives the un-amplified event of one step (default: one Gaussian of multiplier σ); its ε must fall as
    σ grows. `history` is what was released before and counts too. The returned σ really satisfies the target.
    """
    _check_target(target_epsilon)
    epsilon([], delta, method, neighbouring)  # refuses a bad delta, method or relation before any search
    n = _count(steps, "steps", least=1)
    make = gaussian if make_event is None else make_event
    spent = epsilon(list(history), delta, method, neighbouring)
    if spent >= target_epsilon:
        raise AccountingError(
            f"target_epsilon = {target_epsilon} is spent already: what was released before costs ε = {upper(spent, 4)}. Use a "
            "larger target, or other records (a new PrivacyEngine)"
        )

    def cost(sigma: float, by: Method) -> float:
        return epsilon([*history, (poisson(sample_rate, make(sigma)), n)], delta, by, neighbouring)

    start = _start(cost, target_epsilon) if neighbouring == "add-or-remove-one" else (1.0, -1.0)
    return _smallest_sigma(lambda sigma: cost(sigma, method), start, target_epsilon)


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


def _start(cost: Callable[[float, Method], float], target: float) -> tuple[float, float]:
    """(σ, d log ε / d log σ) near the answer from the cheap accountant: only where the search starts."""
    try:
        low, high = 0.05, 1.0
        while cost(high, "rdp") > target and high < _LARGEST:
            low, high = high, high * 2
        for _ in range(10):
            middle = math.sqrt(low * high)
            if cost(middle, "rdp") <= target:
                high = middle
            else:
                low = middle
        slope = math.log(cost(high * 1.05, "rdp") / cost(high, "rdp")) / math.log(1.05)
        return high, min(slope, -0.2)
    except (AccountingError, ZeroDivisionError, ValueError):
        return 1.0, -1.0


def _smallest_sigma(cost: Callable[[float], float], start: tuple[float, float], target: float) -> float:
    """Smallest σ, to 0.1 %, whose measured cost is within the target.

    log ε is nearly linear in log σ: extrapolate with the slope until both sides of the target have been seen, then
    interpolate; every third step bisects, so that the bracket always shrinks.
    """
    sigma, slope = start
    below: tuple[float, float] | None = None  # too little noise
    above: tuple[float, float] | None = None  # enough
    reach = 0.2 * _TIGHT
    for turn in itertools.count():
        eps = cost(sigma)
        if eps <= target:
            above = (sigma, eps)
        else:
            below = (sigma, eps)
        if below and above:
            if 0 < above[1] < below[1] < math.inf:
                slope = math.log(above[1] / below[1]) / math.log(above[0] / below[0])
            excess = math.log(target / above[1]) / -slope if above[1] > 0 else math.inf
            if excess <= _TIGHT / 2 or above[0] / below[0] <= 1 + _TIGHT:
                return above[0]
            sigma = _between(below, above, target, interpolate=turn % 3 != 2)
            continue
        jump = math.log(target / eps) / slope if 0 < eps < math.inf else 0.0
        sigma = sigma * math.exp(jump + reach) if below else sigma * math.exp(jump - reach)
        reach *= 3
        if sigma > _LARGEST:
            raise AccountingError(
                f"target_epsilon = {target} cannot be reached by any noise up to σ = {_LARGEST:g}; "
                "use a larger epsilon or delta, or fewer steps"
            )
        if above and sigma < _SMALLEST:
            return above[0]
    raise AssertionError  # unreachable: the loop above only ends by returning


def _between(below: tuple[float, float], above: tuple[float, float], target: float, interpolate: bool) -> float:
    """A σ strictly inside the bracket: near the crossing of log ε with the target, or the geometric middle."""
    width = math.log(above[0] / below[0])
    share = 0.5
    if interpolate and 0 < above[1] < below[1] < math.inf:
        share = math.log(below[1] / target) / math.log(below[1] / above[1])
        share += 0.2 * _TIGHT / width  # land on the safe side, so that the next point closes the bracket
    margin = min(0.5, 0.1 * _TIGHT / width)
    return below[0] * math.exp(width * min(max(share, margin), 1 - margin))


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise AccountingError(f"target_epsilon = {target} must be a finite number above 0")
