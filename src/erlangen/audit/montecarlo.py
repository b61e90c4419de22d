"""Monte Carlo on real releases: find the pair and the score that tell most (`search`), then count on fresh trials.

A release is one call of ``release()`` through the real code. Where a mechanism's noise is added by `NoiseSource.perturb`
coordinate by coordinate to a sum that is otherwise finished, many releases are drawn at once: the sum is computed once by the
real `accumulate`, copied along a new leading dimension, and goes through the real `finish`. Each row then is one independent
release, because `perturb` treats coordinates independently (the noise audit tests that) and the geometry acts on trailing
dimensions only. This is done for exactly the two `finish` methods of which it was checked by reading them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from erlangen.audit.distinguish import PILOT, balanced, best_tail
from erlangen.audit.intervals import Counts
from erlangen.audit.neighbours import Gradients, Pair, flatten, portfolio
from erlangen.audit.scores import Score, along
from erlangen.audit.search import choose, pilot_size, planned
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import CONFIDENCE, Claim, Evidence, Finding, conclude
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.published import Layerwise

CHUNK = 250_000
LARGEST_PILOT = 5_000_000
ROW_WISE = (GaussianMechanism.finish, Layerwise.finish)
#: told how many releases are done, of how many
Progress = Callable[[int, int], None]


class Releases(Protocol):
    """All that the audit needs of a mechanism, ours or not."""

    def release(self, gradients: Gradients) -> Mapping[str, Tensor]:
        """One private release from per-sample gradients [n, *shape]; n may be 0."""

    def event(self) -> Any:
        """What one release claims to be, as a `dp_accounting` event."""


@dataclass(frozen=True)
class Subject:
    """Something to audit: ``build()`` makes it afresh, ready for gradients of these shapes."""

    name: str
    build: Callable[[], Releases]
    shapes: Mapping[str, torch.Size]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Releaser:
    """Draws independent releases of one object, each from the same starting state."""

    def __init__(self, subject: Subject) -> None:
        self.mechanism = subject.build()
        self.count, self.seconds = 0, 0.0
        nobody = {n: torch.zeros(0, *s) for n, s in subject.shapes.items()}
        self.mechanism.release(nobody)  # whatever adapts to private output has adapted once
        state = self.mechanism.state_dict() if isinstance(self.mechanism, Mechanism) else {}
        # what a release learns from its own private output (a reference, a threshold) would tie trials together
        self._state = {k: v for k, v in state.items() if k != "noise"}
        self._stateful = bool(self._state) and not self._constant(nobody)

    def _constant(self, nobody: Gradients) -> bool:
        self.mechanism.release(nobody)
        return {k: v for k, v in self.mechanism.state_dict().items() if k != "noise"} == self._state  # type: ignore[attr-defined]

    @property
    def row_wise(self) -> bool:
        m = self.mechanism
        return (
            isinstance(m, GaussianMechanism)
            and type(m).finish in ROW_WISE
            and type(m).accumulate is GaussianMechanism.accumulate
            and m.clipping.side_query(torch.zeros(1, 0)) is None
        )

    def draw(self, gradients: Gradients, count: int) -> Tensor:
        """[count, d] flat releases."""
        started = time.perf_counter()
        out = self._rows(gradients, count) if self.row_wise else self._loop(gradients, count)
        self.count, self.seconds = self.count + count, self.seconds + time.perf_counter() - started
        return out

    def _loop(self, gradients: Gradients, count: int) -> Tensor:
        out: Tensor | None = None
        for k in range(count):
            if self._stateful:
                noise = self.mechanism.noise.state_dict()  # type: ignore[attr-defined]
                self.mechanism.load_state_dict({**self._state, "noise": noise})  # type: ignore[attr-defined]
            flat = flatten(self.mechanism.release(gradients))
            if out is None:
                out = flat.new_empty(count, flat.numel())
            out[k] = flat
        assert out is not None
        return out

    def _rows(self, gradients: Gradients, count: int) -> Tensor:
        m = self.mechanism
        assert isinstance(m, GaussianMechanism)
        m.accumulate(PerSampleGradients.from_dense(gradients))
        m._sum = {n: t.expand(count, *t.shape).contiguous() for n, t in m._sum.items()}
        return torch.cat([t.reshape(count, -1) for t in m.finish(m.expected_batch).values()], 1)


@single_threaded
def audit_releases(
    subject: Subject, trials: int, *, claim: Claim | None = None, delta: float = 1e-5, exact: float | None = None,
    pairs: list[Pair] | None = None, pilot: int | None = None, seed: int = 0, confidence: float = CONFIDENCE,
    progress: Progress | None = None,
) -> Finding:  # fmt: skip
    """Attack one release with ``trials`` trials in each world. The claim is the subject's own event unless given.

    The search draws ``pilot`` releases of each pair that it takes seriously; none of them is counted.
    """
    releaser = Releaser(subject)
    claim = Claim.of(releaser.mechanism.event(), delta) if claim is None else claim
    pairs = portfolio(subject.shapes, seed) if pairs is None else pairs
    pilot = pilot_size(trials, releaser.row_wise) if pilot is None else pilot
    total, done = planned(len(pairs), pilot) + 2 * trials, 0

    def tick(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(min(done, total), total)

    score = choose(releaser, pairs, pilot, tick) if pilot else Score("plain", along(pairs[0]), pairs[0])
    seen = _count(releaser, score, trials, claim.delta, 1 - confidence, tick)
    facts = {
        **subject.facts,
        "neighbours": score.pair.name,
        "score": score.name,
        "releases": releaser.count,
        "releases_per_second": round(releaser.count / max(releaser.seconds, 1e-9)),
        "vectorised": releaser.row_wise,
    }
    return conclude(
        subject.name, "mechanism", seen, claim, exact=exact, trials=trials, facts=facts, confidence=confidence
    )


def _count(
    releaser: Releaser, score: Score, trials: int, delta: float, alpha: float, tick: Callable[[int], None]
) -> Evidence:
    """Fresh trials of both worlds: the first choose thresholds, the others are counted as they come."""
    first = min(max(1, int(trials * PILOT)), LARGEST_PILOT)
    step = CHUNK if releaser.row_wise else 1000
    worlds = score.pair.joined, score.pair.others

    def draw(count: int) -> list[np.ndarray]:
        out = [
            np.concatenate([score(releaser.draw(g, min(step, count - k))) for k in range(0, count, step)])
            for g in worlds
        ]
        tick(2 * count)
        return out

    w, o = draw(first)
    chosen = balanced(w, o), best_tail(w, o, (trials - first, trials - first), delta, alpha)
    errors = np.zeros((2, 2), dtype=np.int64)
    for start in range(first, trials, step):
        w, o = draw(min(step, trials - start))
        counts = [t.count(w, o) for t in chosen]
        errors += np.array([[c.fp, c.fn] for c in counts])
    return Evidence(*[Counts(int(fp), trials - first, int(fn), trials - first) for fp, fn in errors])
