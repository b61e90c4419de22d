"""The accountant: a growing history of events, and what it costs so far."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .epsilon import Method, Neighbouring, epsilon
from .events import EventError, _count, from_json, gaussian, poisson, to_json
from .protected import Protected, mixed

if TYPE_CHECKING:
    from dp_accounting import DpEvent

STATE_VERSION = 1


class Accountant:
    """Records events in order; equal consecutive events share one entry."""

    def __init__(self, neighbouring: Neighbouring = "add-or-remove-one") -> None:
        epsilon([], 0.5, "pld", neighbouring)  # refuses an unknown relation
        self.neighbouring: Neighbouring = neighbouring
        self._history: list[tuple[DpEvent, int]] = []
        #: how many releases of the history each accountant recorded: equal events of two are releases of both
        self._recorded: dict[str, int] = {}
        #: whom the releases protect, where that was said
        self._protected: tuple[Protected, ...] = ()
        self._name = secrets.token_hex(8)
        self._shared = False

    def share(self, name: str) -> None:
        """Everybody who records under this name records the same releases: the workers of one training."""
        self._name, self._shared = name, True

    def __getstate__(self) -> dict[str, Any]:
        """Copies record releases of their own."""
        apart = {} if self._shared else {"_name": secrets.token_hex(8)}
        return {**self.__dict__, "_history": list(self._history), "_recorded": dict(self._recorded), **apart}

    def record(self, event: DpEvent, count: int = 1, protected: Protected | None = None) -> None:
        """Append `count` releases of `event`; ``protected`` says whom they protect."""
        from dp_accounting import DpEvent

        if not isinstance(event, DpEvent):
            raise EventError(f"an accountant records DpEvents, not {type(event).__name__}")
        n = _count(count, "count", least=0)
        if n == 0:
            return
        if self._history and self._history[-1][0] == event:
            self._history[-1] = (event, self._history[-1][1] + n)
        else:
            self._history.append((event, n))
        own = self._name if self._shared else f"{self._name}-{os.getpid()}"  # a fork has the name of its parent
        self._recorded[own] = self._recorded.get(own, 0) + n
        if protected is not None and protected not in self._protected:
            self._protected = (*self._protected, protected)

    @property
    def mixed(self) -> str | None:
        """Why what was recorded does not add up: some of it protects other units; None if it does."""
        return mixed(self._protected)

    def require_agreement(self, protected: Protected | None) -> None:
        """Raise if releases that protect these do not add up with what was recorded."""
        if protected is not None and (why := mixed((*self._protected, protected))):
            raise EventError(f"{self.steps} releases were recorded before, and these would not add up with them: {why}")

    @property
    def history(self) -> tuple[tuple[DpEvent, int], ...]:
        """Everything recorded, as (event, count) in order."""
        return tuple(self._history)

    @property
    def steps(self) -> int:
        """Number of releases recorded."""
        return sum(count for _, count in self._history)

    def epsilon(self, delta: float, method: Method = "pld") -> float:
        """ε of everything recorded, at `delta`; ∞ where it protects different units (`mixed` says why)."""
        if self.mixed:
            return math.inf
        return epsilon(self._history, delta, method, self.neighbouring)

    def state_dict(self) -> dict[str, Any]:
        """The history as JSON-able data."""
        return {
            "version": STATE_VERSION,
            "neighbouring": self.neighbouring,
            "history": [{"event": to_json(event), "count": count} for event, count in self._history],
            "recorded": dict(self._recorded),
            "protected": [protected.to_json() for protected in self._protected],
        }

    def load_state_dict(self, state: Mapping[str, Any], protected: Protected | None = None) -> None:
        """Go on from a saved history; nothing changes if the state is not valid, or lacks what was recorded here since: setting
        a run back does not take its releases back, and another run's releases do not stand for them. Nor does it if those
        whom the next releases will protect (``protected``) are other units than those of the history."""
        if state.get("version") != STATE_VERSION:
            raise EventError(f"accountant state has version {state.get('version')!r}; expected {STATE_VERSION}")
        loaded = Accountant(state["neighbouring"])
        for entry in state["history"]:
            loaded.record(from_json(entry["event"]), entry["count"])
        loaded._recorded = _recorded(state.get("recorded"), loaded.steps)
        said = tuple(map(Protected.from_json, state.get("protected", ())))
        loaded._protected = tuple(dict.fromkeys((*self._protected, *said)))
        loaded.require_agreement(protected)
        known = all(loaded._recorded.get(name, 0) >= count for name, count in self._recorded.items())
        if not (known and _continues(self._history, loaded._history)):
            raise EventError(
                f"the saved history has {loaded.steps} releases and lacks some of the {self.steps} that were recorded here: what "
                "was released stays spent. Keep this history, or load the state into a new Accountant"
            )
        self.neighbouring, self._history, self._recorded = loaded.neighbouring, loaded._history, loaded._recorded
        self._protected = loaded._protected


def _recorded(by_name: Any, steps: int) -> dict[str, int]:
    """Who recorded how many of ``steps`` releases, from a saved state."""
    if not isinstance(by_name, Mapping):
        raise EventError("accountant state does not say who recorded its releases")
    counts = {str(name): _count(n, "recorded", least=1) for name, n in by_name.items()}
    if sum(counts.values()) != steps:
        raise EventError(f"accountant state has {steps} releases, and {sum(counts.values())} by who recorded them")
    return counts


def _continues(before: list[tuple[DpEvent, int]], after: list[tuple[DpEvent, int]]) -> bool:
    """Whether a history begins with all of another one."""
    if not before:
        return True
    (event, count), place = before[-1], len(before) - 1
    begins = before[:-1] == after[:place] and len(after) > place
    return begins and after[place][0] == event and after[place][1] >= count


def from_opacus(history: Iterable[tuple[float, float, int]]) -> Accountant:
    """The accountant of an Opacus history [(noise multiplier, sample rate, steps), …].

    Opacus accounts every entry as a Poisson-sampled Gaussian; whether its loader really sampled that way is for the
    caller to know.
    """
    accountant = Accountant()
    for entry in history:
        try:
            sigma, rate, steps = entry
        except (TypeError, ValueError):
            raise EventError(f"an Opacus history holds (noise multiplier, rate, steps), found {entry!r}") from None
        accountant.record(poisson(rate, gaussian(sigma)), steps)
    return accountant
