"""What happened: privacy events, their construction and their JSON form.

An event says *what* was released, never what it costs; `erlangen.accounting.epsilon` prices it. Events are the frozen
classes of `dp_accounting`, which is imported inside functions because it takes more than a second to load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MAX_DEPTH = 16
"""Deepest nesting of events that `from_json` accepts."""

MAX_NODES = 100_000
"""Largest number of events, over all levels, that `from_json` accepts in one document."""

MAX_COUNT = 10**9
"""Largest repetition count of one event: far above any training run, far below where floats lose integers."""


class EventError(ValueError):
    """A document or a value that does not describe a known privacy event."""


def gaussian(noise_multiplier: float) -> DpEvent:
    """One Gaussian release with noise std = `noise_multiplier` × L2 sensitivity; no noise is no privacy (ε = ∞)."""
    import dp_accounting

    sigma = _number(noise_multiplier, "noise_multiplier")
    if sigma < 0:
        raise EventError(f"noise_multiplier = {sigma} is negative; it is noise std / sensitivity, so use a value >= 0")
    return dp_accounting.NonPrivateDpEvent() if sigma == 0 else dp_accounting.GaussianDpEvent(sigma)


def laplace(noise_multiplier: float) -> DpEvent:
    """One Laplace release with scale = `noise_multiplier` × L1 sensitivity; scale 0 is no privacy (ε = ∞)."""
    import dp_accounting

    scale = _number(noise_multiplier, "noise_multiplier")
    if scale < 0:
        raise EventError(f"noise_multiplier = {scale} is negative; it is noise scale / sensitivity: use a value >= 0")
    return dp_accounting.NonPrivateDpEvent() if scale == 0 else dp_accounting.LaplaceDpEvent(scale)


def non_private(reason: str) -> DpEvent:
    """A release without a guarantee: ε = ∞ whatever it is composed with.

    `dp_accounting`'s event has no field for the reason, which therefore belongs beside the event (the ledger and the
    certificate have a place for it); requiring it here makes sure that somebody wrote it down.
    """
    import dp_accounting

    if not isinstance(reason, str) or not reason.strip():
        raise EventError("a non-private release needs a reason, e.g. non_private('training loss was logged')")
    return dp_accounting.NonPrivateDpEvent()


def no_op() -> DpEvent:
    """An operation that touches no private record."""
    import dp_accounting

    return dp_accounting.NoOpDpEvent()


def poisson(sample_rate: float, event: DpEvent) -> DpEvent:
    """`event` applied to a Poisson sample: each record enters independently with probability `sample_rate`."""
    import dp_accounting

    q = _number(sample_rate, "sample_rate")
    if not 0 <= q <= 1:
        raise EventError(f"sample_rate = {q} is not a probability; it is expected batch size / number of records")
    if q == 1:
        return event
    return dp_accounting.PoissonSampledDpEvent(q, event)


def composed(event: DpEvent, count: int) -> DpEvent:
    """`count` adaptive repetitions of `event`."""
    import dp_accounting

    n = _count(count, "count", least=0)
    if n == 0:
        return dp_accounting.NoOpDpEvent()
    return event if n == 1 else dp_accounting.SelfComposedDpEvent(event, n)


def sequence(events: Sequence[DpEvent]) -> DpEvent:
    """The adaptive composition of several events."""
    import dp_accounting

    return dp_accounting.ComposedDpEvent(list(events))


def repeat_and_select(event: DpEvent, mean: float, shape: float = 1.0) -> DpEvent:
    """The best of a random number of runs of `event` (hyper-parameter search); RDP prices it, PLD cannot.

    The number of runs must really be drawn from the distribution: Poisson (`shape` = inf), geometric (1), logarithmic
    (0) or truncated negative binomial, with the given `mean`. A fixed number of runs is plain composition instead.
    """
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    m = _number(mean, "mean")
    k = math.inf if shape == math.inf else _number(shape, "shape")
    if k < 0:
        raise EventError(f"shape = {k} is negative; use inf (Poisson), 1 (geometric), 0 (logarithmic) or a value >= 0")
    if m < 1 if k != math.inf else m <= 0:
        raise EventError(f"mean = {m} repetitions is too small; the mean number of runs must be at least 1")
    return RepeatAndSelectDpEvent(event, m, k)


# --- JSON ----------------------------------------------------------------------------------------------------------
# A closed whitelist: a name selects a constructor below and nothing else, so that a hostile document can at worst
# describe an expensive event.


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as plain JSON data; `from_json` is its inverse. Unknown event types raise `EventError`."""
    name = type(event).__name__
    fields = _codecs().get(name)
    if fields is None:
        raise EventError(f"{name} cannot be written down; supported events: {', '.join(sorted(_codecs()))}")
    out: dict[str, Any] = {"type": name}
    for field, kind in fields[1]:
        value = getattr(event, field)
        if kind == "event":
            out[field] = to_json(value)
        elif kind == "events":
            out[field] = [to_json(child) for child in value]
        elif kind == "count":
            out[field] = int(value)
        else:
            out[field] = "inf" if value == math.inf else float(value)
    return out


def from_json(obj: Any) -> DpEvent:
    """The event described by `obj`; anything outside the whitelist, or out of range, raises `EventError`."""
    budget = [MAX_NODES]
    return _decode(obj, MAX_DEPTH, budget)


def _decode(obj: Any, depth: int, budget: list[int]) -> DpEvent:
    budget[0] -= 1
    if depth <= 0 or budget[0] < 0:
        raise EventError(f"event nested deeper than {MAX_DEPTH} levels or larger than {MAX_NODES} nodes")
    if not isinstance(obj, dict):
        raise EventError(f"an event must be a JSON object, not {type(obj).__name__}")
    name = obj.get("type")
    codec = _codecs().get(name) if isinstance(name, str) else None
    if codec is None:
        raise EventError(f"unknown event type {str(name)[:60]!r}; known: {', '.join(sorted(_codecs()))}")
    build, fields = codec
    expected = {"type"} | {field for field, _ in fields}
    if set(obj) != expected:
        raise EventError(f"{name} must have exactly the fields {sorted(expected)}")
    arguments: list[Any] = []
    for field, kind in fields:
        value = obj[field]
        if kind == "event":
            arguments.append(_decode(value, depth - 1, budget))
        elif kind == "events":
            if not isinstance(value, list):
                raise EventError(f"{name}.{field} must be a list of events")
            arguments.append([_decode(child, depth - 1, budget) for child in value])
        elif kind == "count":
            arguments.append(_count(value, f"{name}.{field}", least=1))
        elif kind == "shape" and value == "inf":
            arguments.append(math.inf)
        else:
            arguments.append(_number(value, f"{name}.{field}"))
    return build(*arguments)


@cache
def _codecs() -> dict[str, tuple[Callable[..., DpEvent], tuple[tuple[str, str], ...]]]:
    """Event name → (validating constructor, ((field, kind), …)) in constructor order."""
    from dp_accounting.dp_event import NonPrivateDpEvent

    return {
        "NoOpDpEvent": (no_op, ()),
        "NonPrivateDpEvent": (NonPrivateDpEvent, ()),
        "GaussianDpEvent": (gaussian, (("noise_multiplier", "number"),)),
        "LaplaceDpEvent": (laplace, (("noise_multiplier", "number"),)),
        "PoissonSampledDpEvent": (poisson, (("sampling_probability", "number"), ("event", "event"))),
        "SelfComposedDpEvent": (composed, (("event", "event"), ("count", "count"))),
        "ComposedDpEvent": (sequence, (("events", "events"),)),
        "RepeatAndSelectDpEvent": (repeat_and_select, (("event", "event"), ("mean", "number"), ("shape", "shape"))),
    }


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and not hasattr(value, "__float__")):
        raise EventError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EventError(f"{name} = {str(value)[:40]} is not a finite number")
    return number


def _count(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise EventError(f"{name} must be a whole number, not {type(value).__name__}")
    n = value.__index__()
    if not least <= n <= MAX_COUNT:
        raise EventError(f"{name} = {n} is out of range; use {least} to {MAX_COUNT}")
    return int(n)
