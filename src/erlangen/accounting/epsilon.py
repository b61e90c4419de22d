"""What it cost: (ε, δ) from events.

Two accountants, both from `dp_accounting`: PLD (the default: the composed privacy-loss distribution, discretised
upwards, so that ε is an upper bound tight to about 0.1 %) and RDP (looser, and the only one that knows
repeat-and-select). A history with a non-private event costs ε = ∞.

δ means the same thing in both: for every pair of neighbouring data sets and every event E,
P[M(D) ∈ E] ≤ e^ε P[M(D') ∈ E] + δ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from .normal import Normal, normalise

if TYPE_CHECKING:
    from .normal import Events

Method = Literal["pld", "rdp"]
Neighbouring = Literal["add-or-remove-one", "replace-one"]
NEIGHBOURING: tuple[Neighbouring, ...] = ("add-or-remove-one", "replace-one")

SMALLEST_PLD_DELTA = 1e-12
"""Below this the truncated tails and rounding of the PLD accountant are as large as δ itself."""

_MAX_INTERVAL = 1e-4
_MIN_INTERVAL = 1e-6
_MAX_STEP_POINTS = 400_000
_MAX_TOTAL_POINTS = 2_000_000
_ONE_STAGE = 200_000
_ROUNDING = 2.0**-53  # of δ, for every step: powers by Fourier transform were seen to lose a sixth of it, and to add half
_TAIL = 10.0  # standard deviations kept by the PLD's truncation at mass e^-50


class AccountingError(ValueError):
    """ε cannot be computed as asked; the message says what to change."""


def epsilon(
    events: Events, delta: float, method: Method = "pld", neighbouring: Neighbouring = "add-or-remove-one"
) -> float:
    """Smallest ε the accountant proves at `delta` for an event, or for (event, count) pairs. Cached.

    Never negative, never NaN; ∞ exactly when some event is non-private (or has a noise multiplier below 0.001).
    """
    _check(delta, method, neighbouring)
    normal = normalise(events)
    return math.inf if normal is None else _epsilon(normal, float(delta), method, neighbouring)


def delta(
    events: Events, epsilon: float, method: Method = "pld", neighbouring: Neighbouring = "add-or-remove-one"
) -> float:
    """Smallest δ the accountant proves at `epsilon`; 1 when some event is non-private."""
    _check(0.5, method, neighbouring)
    if not epsilon >= 0:
        raise AccountingError(f"epsilon = {epsilon} is not a number >= 0")
    normal = normalise(events)
    if normal is None:
        return 1.0
    if not normal:
        return 0.0
    value = 0.0 if epsilon == math.inf else _curve(normal, method, neighbouring).delta(float(epsilon))
    return _sane("delta", min(float(value), 1.0), normal)


# --- the two accountants -------------------------------------------------------------------------------------------


class _Curve:
    """The privacy curve of one history: ε(δ) and δ(ε)."""

    def __init__(self, epsilon: Callable[[float], float], delta: Callable[[float], float]) -> None:
        self.epsilon = epsilon
        self.delta = delta


@lru_cache(maxsize=4096)
def _epsilon(normal: Normal, delta: float, method: Method, neighbouring: Neighbouring) -> float:
    if not normal:
        return 0.0
    if method == "pld" and delta < SMALLEST_PLD_DELTA:
        raise AccountingError(
            f"delta = {delta:g} is below {SMALLEST_PLD_DELTA:g}, the smallest the PLD accountant resolves; "
            "use a larger delta or method='rdp'"
        )
    try:
        value = float(_curve(normal, method, neighbouring).epsilon(delta))
    except (ArithmeticError, MemoryError):
        value = math.nan
    if method == "rdp" and value == 0 and _zero_is_doubtful(normal, delta):
        raise AccountingError(
            f"the RDP accountant rounds epsilon to 0 for {normal!r:.200}; the releases are too many and too small for "
            "its arithmetic: use method='pld'"
        )
    return _sane("epsilon", value, normal)


@lru_cache(maxsize=6)
def _curve(normal: Normal, method: Method, neighbouring: Neighbouring) -> _Curve:
    from dp_accounting import GaussianDpEvent

    if neighbouring == "replace-one":
        normal = _replace_one(normal, method)
    if method == "rdp":
        return _rdp(normal)
    if len(normal) == 1 and isinstance(normal[0][0], GaussianDpEvent):
        return _gaussian(normal[0][0].noise_multiplier)
    return _pld(normal, neighbouring)


def _gaussian(sigma: float) -> _Curve:
    """Plain Gaussians compose to one Gaussian, whose curve is known in closed form (Balle and Wang 2018)."""
    from dp_accounting import get_epsilon_gaussian
    from scipy.special import log_ndtr

    mu = 1.0 / sigma

    def delta(eps: float) -> float:
        # δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), in logarithms because e^ε overflows
        first, second = float(log_ndtr(mu / 2 - eps / mu)), eps + float(log_ndtr(-mu / 2 - eps / mu))
        return 0.0 if second >= first else -math.exp(first) * math.expm1(second - first)

    return _Curve(lambda d: float(get_epsilon_gaussian(sigma, d)), delta)


def _pld(normal: Normal, neighbouring: Neighbouring) -> _Curve:
    interval = _interval(normal)
    parts = [_one_release(event, interval, neighbouring) for event, _ in normal]
    total = None
    for part, (_, count) in zip(parts, normal):
        power = _power(part, count)
        total = power if total is None else total.compose(power)
    assert total is not None  # the empty history has been priced before
    lost = _ROUNDING * sum(count for _, count in normal)
    least = lambda d: math.inf if d <= lost else total.get_epsilon_for_delta(d - lost)  # noqa: E731
    return _Curve(least, lambda e: min(1.0, total.get_delta_for_epsilon(e) + lost))


def _power(part: Any, count: int) -> Any:
    """`count`-fold composition. Large counts go in two stages: a small grid to a large power is slow in one."""
    if count <= _ONE_STAGE:
        return part if count == 1 else part.self_compose(count)
    thousands, rest = divmod(count, 1000)
    power = part.self_compose(1000).self_compose(thousands)
    return power.compose(_power(part, rest)) if rest else power


@lru_cache(maxsize=32)
def _one_release(event: Any, interval: float, neighbouring: Neighbouring) -> Any:
    """The privacy-loss distribution of one elementary event (cached: it is the slow part, the powers are FFTs)."""
    from dp_accounting.pld import privacy_loss_distribution as distribution

    q, multiplier, gaussian = _shape(event)
    if gaussian:
        return distribution.from_gaussian_mechanism(
            multiplier,
            value_discretization_interval=interval,
            sampling_prob=q,
            neighboring_relation=_relation(neighbouring),
        )
    return distribution.from_laplace_mechanism(multiplier, value_discretization_interval=interval, sampling_prob=q)


def _rdp(normal: Normal) -> _Curve:
    from dp_accounting import UnsupportedEventError
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    try:
        with _quiet():
            for event, count in normal:
                accountant.compose(event, count)
    except UnsupportedEventError as error:
        raise _unsupported(normal, "rdp", "add-or-remove-one") from error
    return _Curve(_quietly(accountant.get_epsilon), _quietly(accountant.get_delta))


def _interval(normal: Normal) -> float:
    """Discretisation of the privacy loss: fine enough to be tight, coarse enough to fit in memory.

    Rounding the loss L of one step onto a grid of width h adds at most about h²/6 to its variance. Over T steps the
    relative error of ε is therefore about h²/(12 s²), where s² is the mean variance of L per step; s = q/σ is a lower
    bound. h = s/20 keeps the error near 2e-4. A coarser grid than that still gives a valid upper bound.
    """
    variance, steps, total_mean, step_range = 0.0, 0, 0.0, 0.0
    for event, count in normal:
        q, sigma, gaussian = _shape(event)
        variance += count * (q / sigma) ** 2
        steps += count
        spread = math.expm1(min(sigma**-2, 50.0)) if gaussian else math.expm1(min(2 / sigma, 50.0))
        total_mean += count * min(q * q * spread, sigma**-2 if gaussian else 1 / sigma)
        loss = _TAIL / sigma + sigma**-2 / 2 if gaussian else 1 / sigma
        step_range = max(step_range, math.log1p(q * math.expm1(loss)) if loss < 500 else loss + math.log(q))
    total_range = step_range + total_mean / 2 + _TAIL * math.sqrt(total_mean)
    wanted = min(_MAX_INTERVAL, math.sqrt(variance / steps) / 20)
    needed = max(_MIN_INTERVAL, step_range / _MAX_STEP_POINTS, total_range / _MAX_TOTAL_POINTS)
    if needed >= wanted:
        return _ladder(needed, math.ceil)
    return max(_ladder(wanted, math.floor), needed)


def _ladder(interval: float, rounding: Callable[[float], int]) -> float:
    """The nearest 1e-4·2^k: histories that differ only in length then share the cached one-step distributions."""
    return _MAX_INTERVAL * 2.0 ** rounding(math.log2(interval / _MAX_INTERVAL))


def _shape(event: Any) -> tuple[float, float, bool]:
    """(q, noise multiplier, is it Gaussian) of an elementary event."""
    from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

    q = 1.0
    if isinstance(event, PoissonSampledDpEvent):
        q, event = event.sampling_probability, event.event
    if not isinstance(event, (GaussianDpEvent, LaplaceDpEvent)):
        raise AccountingError(f"{type(event).__name__} has no PLD; use method='rdp' (repeat-and-select is RDP only)")
    return q, event.noise_multiplier, isinstance(event, GaussianDpEvent)


def _zero_is_doubtful(normal: Normal, delta: float) -> bool:
    """Whether ε = 0 contradicts the central limit: δ(0) ≈ μ/√(2π) with μ² = Σ n q² (e^(1/σ²) − 1).

    The RDP accountant returns 0 when a divergence below its rounding error comes out negative.
    """
    square = 0.0
    for event, count in normal:
        try:
            q, sigma, gaussian = _shape(event)
        except AccountingError:
            continue
        if gaussian:
            square += count * q * q * math.expm1(min(sigma**-2, 50.0))
    return math.sqrt(square / (2 * math.pi)) > delta


def _replace_one(normal: Normal, method: Method) -> Normal:
    """Rewrite plain Gaussians for replace-one: the sum moves by up to 2C, so the multiplier is σ/2.

    `dp_accounting`'s RDP accountant ignores the relation for Gaussian and Laplace events, which would under-count;
    what is not proved here is refused.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    plain = len(normal) == 1 and isinstance(normal[0][0], GaussianDpEvent)
    if plain:
        return ((GaussianDpEvent(normal[0][0].noise_multiplier / 2), 1),)
    gaussian = all(
        isinstance(event.event if isinstance(event, PoissonSampledDpEvent) else event, GaussianDpEvent)
        for event, _ in normal
    )
    if method == "rdp" or not gaussian:
        raise _unsupported(normal, method, "replace-one")
    return normal


# --- checks --------------------------------------------------------------------------------------------------------


def _check(delta: float, method: str, neighbouring: str) -> None:
    if isinstance(delta, bool) or (not isinstance(delta, (int, float)) and not hasattr(delta, "__float__")):
        raise AccountingError(f"delta must be a number, not {type(delta).__name__}")
    if not 0 < float(delta) < 1:
        raise AccountingError(f"delta = {delta} is not strictly between 0 and 1; below 1/(number of records) is usual")
    if method not in ("pld", "rdp"):
        raise AccountingError(f"method = {method!r} is unknown; use 'pld' or 'rdp'")
    if neighbouring not in NEIGHBOURING:
        raise AccountingError(f"neighbouring = {neighbouring!r} is unknown; use one of {', '.join(NEIGHBOURING)}")


def _relation(neighbouring: Neighbouring) -> Any:
    from dp_accounting import NeighboringRelation

    return {
        "add-or-remove-one": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace-one": NeighboringRelation.REPLACE_ONE,
    }[neighbouring]


def _unsupported(normal: Normal, method: str, neighbouring: str) -> AccountingError:
    names = ", ".join(sorted({repr(event)[:120] for event, _ in normal}))
    cure = {
        ("rdp", "add-or-remove-one"): "use method='pld'",
        ("pld", "replace-one"): "use Gaussian releases (with or without Poisson sampling) or add-or-remove-one",
        ("rdp", "replace-one"): "use method='pld' or neighbouring='add-or-remove-one'",
    }[method, neighbouring]
    return AccountingError(f"the {method.upper()} accountant cannot price {names} under {neighbouring}; {cure}")


def _sane(name: str, value: float, normal: Normal) -> float:
    if math.isnan(value) or value < 0:
        raise AccountingError(
            f"the accountant returned {name} = {value} for {normal!r:.300}; this is a numerical failure: "
            "use a larger delta, a noise multiplier nearer 1, or the other method"
        )
    if value == math.inf and name == "epsilon":
        raise AccountingError(
            f"the accountant cannot bound epsilon for {normal!r:.300} at this delta; "
            "use a larger delta, more noise or fewer steps"
        )
    return value


def _quietly(function: Callable[[float], float]) -> Callable[[float], float]:
    def call(value: float) -> float:
        with _quiet():
            return float(function(value))

    return call


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the RDP accountant's notes about orders it leaves out (which only loosens the bound) and about rounding
    of divergences near zero."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
