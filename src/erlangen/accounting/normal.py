"""The normal form of a history: a flat, merged, hashable tuple of (elementary event, count).

The rewriting keeps the meaning of every event and only makes it easier to price:

- repetitions and compositions are flattened, equal events are merged (composition commutes);
- all plain Gaussians become one, σ = (Σ nᵢ/σᵢ²)^(−1/2), and so do Gaussians released from one Poisson sample;
- nested Poisson sampling multiplies the rates; sampling at rate 0 or of nothing is nothing;
- a non-private event anywhere (a noiseless one included) makes the whole history non-private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .events import MAX_COUNT, EventError, _count

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    Events: TypeAlias = DpEvent | Sequence[tuple[DpEvent, int]]
    """An event, or (event, count) pairs."""

Normal: TypeAlias = "tuple[tuple[DpEvent, int], ...]"


SMALLEST_NOISE, LARGEST_NOISE, SMALLEST_RATE = 1e-3, 1e6, 1e-9
"""Noise below the first is no privacy at all (one such Gaussian release has ε above 500,000, a Laplace one 1000).
Larger noise and rarer sampling than the others are priced as if at these limits: an over-count by nothing that matters,
and the arithmetic stays finite."""


class NonPrivateHistory(Exception):
    """Internal signal: some event of the history has no guarantee."""


def normalise(events: Events) -> Normal | None:
    """The normal form of an event or of (event, count) pairs; `None` where it contains a non-private event."""
    from dp_accounting import DpEvent

    pairs: Iterable[tuple[DpEvent, int]] = [(events, 1)] if isinstance(events, DpEvent) else events
    leaves: dict[DpEvent, int] = {}
    try:
        for pair in pairs:
            try:
                event, count = pair
            except (TypeError, ValueError):
                raise EventError(f"expected a DpEvent or (event, count) pairs, found {pair!r}") from None
            n = _count(count, "count", least=0)
            if n:
                _flatten(event, n, leaves)
        return tuple(_merge_gaussians(leaves).items())
    except NonPrivateHistory:
        return None


def _flatten(event: DpEvent, count: int, leaves: dict[DpEvent, int]) -> None:
    from dp_accounting import dp_event as D

    if count > MAX_COUNT:
        raise EventError(f"{count} repetitions of {event!r} are more than {MAX_COUNT}")
    if isinstance(event, D.NoOpDpEvent):
        return
    if isinstance(event, D.NonPrivateDpEvent):
        raise NonPrivateHistory
    if isinstance(event, (D.GaussianDpEvent, D.LaplaceDpEvent)):
        if not event.noise_multiplier >= 0:
            raise EventError(f"{event!r}: the noise multiplier must be >= 0")
        if event.noise_multiplier < SMALLEST_NOISE:
            raise NonPrivateHistory
        _add(leaves, type(event)(float(min(event.noise_multiplier, LARGEST_NOISE))), count)
    elif isinstance(event, D.SelfComposedDpEvent):
        n = _count(event.count, "count", least=0)
        if n:
            _flatten(event.event, n * count, leaves)
    elif isinstance(event, D.ComposedDpEvent):
        for child in event.events:
            _flatten(child, count, leaves)
    elif isinstance(event, D.PoissonSampledDpEvent):
        _flatten_poisson(event, count, leaves)
    elif isinstance(event, D.RepeatAndSelectDpEvent):
        inner = _inner(event.event)
        if inner is not None:
            _add(leaves, D.RepeatAndSelectDpEvent(inner, event.mean, event.shape), count)
    else:
        raise EventError(f"{type(event).__name__} is not supported; use Gaussian, Laplace, Poisson-sampled, composed, "
                         "repeat-and-select or non-private events")


def _flatten_poisson(event: DpEvent, count: int, leaves: dict[DpEvent, int]) -> None:
    from dp_accounting import dp_event as D

    q = event.sampling_probability
    if not 0 <= q <= 1:
        raise EventError(f"sampling probability {q} is not in [0, 1]")
    if q == 0:
        return
    inner = _inner(event.event)
    if inner is None:
        return
    if isinstance(inner, D.PoissonSampledDpEvent):
        q, inner = q * inner.sampling_probability, inner.event
    if q == 1:
        _flatten(inner, count, leaves)
    elif isinstance(inner, (D.GaussianDpEvent, D.LaplaceDpEvent)):
        _add(leaves, D.PoissonSampledDpEvent(max(float(q), SMALLEST_RATE), inner), count)
    else:
        raise EventError(f"Poisson sampling of {type(inner).__name__} is not supported; sample Gaussian or Laplace "
                         "releases, or claim no amplification")


def _inner(event: DpEvent) -> DpEvent | None:
    """The normal form of a sub-event as one hashable event; `None` if it does nothing."""
    from dp_accounting import dp_event as D

    leaves: dict[DpEvent, int] = {}
    _flatten(event, 1, leaves)
    merged = _merge_gaussians(leaves)
    parts = [leaf if n == 1 else D.SelfComposedDpEvent(leaf, n) for leaf, n in merged.items()]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else D.ComposedDpEvent(tuple(parts))


def _add(leaves: dict[DpEvent, int], event: DpEvent, count: int) -> None:
    leaves[event] = leaves.get(event, 0) + count


def _merge_gaussians(leaves: dict[DpEvent, int]) -> dict[DpEvent, int]:
    from dp_accounting import GaussianDpEvent

    plain = {leaf: n for leaf, n in leaves.items() if isinstance(leaf, GaussianDpEvent)}
    rest = {leaf: n for leaf, n in leaves.items() if leaf not in plain}
    if plain:
        # hypot(√n/σ, …) = 1/σ_total without overflow for tiny σ
        inverse = math.hypot(*(math.sqrt(n) / leaf.noise_multiplier for leaf, n in plain.items()))
        if inverse * SMALLEST_NOISE > 1:
            raise NonPrivateHistory
        rest[GaussianDpEvent(1.0 / inverse)] = 1
    return dict(sorted(rest.items(), key=lambda item: repr(item[0])))
