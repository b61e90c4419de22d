"""The search for neighbours and a score that tell them apart. Nothing here is counted: fresh releases are.

1. *Starts*: every pair of the portfolio, and canaries along the directions with least noise, by the covariance that the
   mechanism states and by the covariance that is measured.
2. *Scores* of a pair: Σ⁻¹·shift, where shift is the release with the noise switched off and Σ the stated covariance (the
   likelihood ratio, if mechanism and statement are what they should be); the canary's own direction; and Fisher's
   discriminant over several views, fitted on one half of the releases and judged on the other.
3. *Refinement*: a canary along the best score itself, which is a step of a power iteration towards the worst direction.

A simpler score is given up only for one that is better by more than a standard error, so that what was fitted to the noise of
a small pilot does not replace what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from erlangen.audit.neighbours import HUGE, Gradients, Pair, unflatten
from erlangen.audit.scores import VIEWS, Score, along, fisher, noise_of, separation
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.noise import NoiseSource

if TYPE_CHECKING:
    from erlangen.audit.montecarlo import Releaser

#: full covariances and fitted views are used up to this many coordinates
SMALL, LARGEST_COVARIANCE = 64, 600
FINALISTS, REFINEMENTS, QUIET, FIRST = 5, 2, 2, 40
#: what the raw view adds to the coordinates of a release
RAW_EXTRAS = 3


class Silence(NoiseSource):
    """No noise: what a mechanism would release if it added none."""

    secure, description = False, "none"

    def next_release(self) -> None:
        """Nothing to open."""

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        return value


@dataclass(frozen=True)
class Found:
    """A score, how well it separates releases that did not fit it, and the standard error of that."""

    value: float
    error: float
    score: Score


def choose(releaser: Releaser, pairs: list[Pair], pilot: int, tick: Callable[[int], None] = lambda n: None) -> Score:
    """The most telling pair and score found."""
    stated = stated_precision(releaser.mechanism)
    if len(pairs) > 1:
        pairs = [*pairs, *quiet_pairs(releaser, pilot, tick)]
    first = max(FIRST, pilot // 10)
    ranked = sorted((_try(releaser, pair, first, stated, tick, True) for pair in pairs), key=lambda f: -f.value)
    best: Found | None = None
    for start in ranked[:FINALISTS]:
        best = _better(best, _try(releaser, start.score.pair, pilot, stated, tick))
    assert best is not None
    for _ in range(REFINEMENTS if len(pairs) > 1 else 0):
        pair = refined(best.score)
        if pair is None:
            break
        best = _better(best, _try(releaser, pair, pilot, stated, tick))
    return best.score


def planned(pairs: int, pilot: int) -> int:
    """About how many releases `choose` draws."""
    return (pairs + 2 * QUIET) * 2 * max(FIRST, pilot // 10) + (FINALISTS + REFINEMENTS + 1) * 2 * pilot


def _better(best: Found | None, found: Found) -> Found:
    return found if best is None or found.value > best.value else best


def _try(
    releaser: Releaser, pair: Pair, count: int, stated: np.ndarray | None, tick: Callable[[int], None], quick: bool = False
) -> Found:  # fmt: skip
    a, b = releaser.draw(pair.joined, count), releaser.draw(pair.others, count)
    tick(2 * count)
    half = count // 2
    best: Found | None = None
    for score in scores(releaser, pair, a[:half], b[:half], stated, quick):
        value = separation(score(a[half:]), score(b[half:]))
        if best is None or value > best.value + best.error:
            best = Found(value, noise_of(count - half), score)
    assert best is not None
    return best


def scores(
    releaser: Releaser, pair: Pair, a: Tensor, b: Tensor, stated: np.ndarray | None, quick: bool = False
) -> Iterator[Score]:
    """Candidates, what is known before what is fitted."""
    d = a.shape[1]
    moved = shift(releaser, pair)
    if moved is not None:
        yield Score("plain", moved if stated is None else stated @ moved, pair, "likelihood ratio")
    views = ["raw"] if quick else ["raw", "unit"]
    if along(pair).shape == (d,):
        yield Score("plain", along(pair), pair, "along the canary")
        views.insert(0, "projected")
    for view in views:
        if view == "projected" or (d <= SMALL and d <= len(a) // 2):
            yield Score(view, fisher(VIEWS[view](a, pair), VIEWS[view](b, pair)), pair, f"fitted, {view}")


def shift(releaser: Releaser, pair: Pair) -> np.ndarray | None:
    """How far the canary moves the release of the same mechanism without noise; None where that cannot be asked."""
    mechanism = releaser.mechanism
    noise = getattr(mechanism, "noise", None)
    if not isinstance(noise, NoiseSource):
        return None
    mechanism.noise = Silence()  # type: ignore[attr-defined]
    try:
        with_canary, without = (releaser.draw(g, 1)[0].detach().double() for g in (pair.joined, pair.others))
    finally:
        mechanism.noise = noise  # type: ignore[attr-defined]
    moved = (with_canary - without).numpy()
    return moved if np.isfinite(moved).all() and np.abs(moved).max() > 0 else None


def stated_covariance(mechanism: object) -> Tensor | None:
    """The covariance that a mechanism of ours states for its released sum, over all parameters."""
    mechanism = getattr(mechanism, "mechanism", mechanism)  # a step of training holds one
    if not isinstance(mechanism, Mechanism) or sum(s.numel() for s in mechanism.shapes.values()) > LARGEST_COVARIANCE:
        return None
    stated = torch.block_diag(*[mechanism.covariance(n) for n in mechanism.shapes]).double()
    return stated if bool(stated.isfinite().all()) and float(stated.diagonal().max()) > 0 else None


def stated_precision(mechanism: object) -> np.ndarray | None:
    """Σ⁻¹; directions that are stated to carry no noise weigh a million times the quietest of the others."""
    stated = stated_covariance(mechanism)
    if stated is None:
        return None
    values, vectors = torch.linalg.eigh(stated)
    live = values > 1e-9 * values.max()
    least = float(values[live].min())
    inverse = torch.where(live, 1 / values.clamp(min=1e-300), 1e6 / least)
    return (vectors * inverse @ vectors.T).numpy()


def quiet_pairs(releaser: Releaser, pilot: int, tick: Callable[[int], None]) -> list[Pair]:
    """Canaries along the directions with least noise, as stated and as measured on releases of an empty batch."""
    shapes = getattr(releaser.mechanism, "shapes", None)
    d = 0 if not shapes else sum(torch.Size(s).numel() for s in shapes.values())
    if not shapes or not 2 <= d <= SMALL:
        return []
    shapes = {n: torch.Size(s) for n, s in shapes.items()}
    nobody: Gradients = {n: torch.zeros(0, *s) for n, s in shapes.items()}
    drawn = releaser.draw(nobody, max(pilot, 4 * d))
    tick(max(pilot, 4 * d))
    if drawn.shape[1] != d:
        return []
    covariances = {"stated": stated_covariance(releaser.mechanism), "measured": torch.cov(drawn.double().T)}
    pairs = []
    for word, covariance in covariances.items():
        if covariance is None or not bool(covariance.isfinite().all()):
            continue
        vectors = torch.linalg.eigh(covariance).eigenvectors[:, :QUIET].T.float()
        for k, v in enumerate(vectors):
            pairs.append(Pair(f"{word} least noise, {k + 1}", unflatten(torch.zeros(0, d), shapes), canary(v, shapes)))
    return pairs


def refined(score: Score) -> Pair | None:
    """The same others with a canary along the score itself, where releases and records have the same coordinates."""
    shapes = {n: g.shape[1:] for n, g in score.pair.canary.items()}
    d = sum(s.numel() for s in shapes.values())
    if d < 2 or (score.view, len(score.weights)) not in (("plain", d), ("raw", d + RAW_EXTRAS)):
        return None
    v = torch.from_numpy(score.weights[:d]).float()
    if not bool(v.isfinite().all()) or float(v.norm()) == 0:
        return None
    name = score.pair.name if score.pair.name.endswith("refined") else f"{score.pair.name}, refined"
    return Pair(name, score.pair.others, canary(v / v.norm(), shapes))


def canary(direction: Tensor, shapes: dict[str, torch.Size]) -> Gradients:
    return unflatten(HUGE * direction[None], shapes)


def pilot_size(trials: int, row_wise: bool) -> int:
    """Enough to find the worst case, little beside the trials: rows are cheap, calls are not."""
    return int(min(max(600, trials // 20), 100_000)) if row_wise else int(min(max(300, trials // 12), 800))


__all__ = [
    "Silence",
    "choose",
    "pilot_size",
    "planned",
    "quiet_pairs",
    "refined",
    "scores",
    "shift",
    "stated_covariance",
]
