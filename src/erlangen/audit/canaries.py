"""White-box audit of a training run: gradient canaries (Nasr et al. 2023), many in one run (Steinke et al. 2023).

A canary is a record whose gradient the attacker chose: a huge vector on a few coordinates of its own. It enters the real mechanism
beside the real batch, is clipped there, and is looked for in the released gradient along its direction, measured in the
noise that the mechanism states. The attacker knows all other records, so their sum is subtracted first. Two kinds share one run:

- *release canaries* flip a fair coin at every step: in or out. Their scores bound the noise of one release (μ_L).
- *run canaries* flip one coin before the run. Those that are in take part in each step with probability q, by a Poisson sampler of
  the same kind as the run's own. The score of the run is the likelihood ratio over all steps; guesses about all of
  them bound ε of the whole run, by counting guesses and by inverting the subsampled curve.

Canaries have disjoint coordinates, so their scores are independent for noise that is independent across coordinates. Where
training has no per-sample gradients, canaries are records (`record_canaries`). What a run with canaries trains is not what was
released: the audit replays a configuration, it does not touch a finished model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erlangen.accounting import gdp_mu
from erlangen.audit import subsampled
from erlangen.audit.distinguish import evidence
from erlangen.audit.intervals import noise_upper_limit
from erlangen.audit.neighbours import HUGE, flatten, unflatten
from erlangen.audit.one_run import best_guesses, conclude_one_run, guess
from erlangen.audit.verdict import CONFIDENCE, CONFIDENCES, Claim, Finding, conclude, failed, level, passed, unable
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import Diagonal, GaussianMechanism, Geometry, Mechanism
from erlangen.sampling import PoissonSampler
from erlangen.streams import Stream

#: coordinates of one canary, where there are enough
SUPPORT = 64
#: trials in each world below which nothing can be said
FEWEST = 4


@dataclass(frozen=True)
class Seen:
    """Scores of a run: one per release canary and step with its coin, one per run canary."""

    release_scores: np.ndarray
    release_in: np.ndarray
    run_scores: np.ndarray
    run_in: np.ndarray


class CanaryTap:
    """Installed on a mechanism: adds canaries to each logical batch before its noise, and scores what comes out."""

    independent = True

    def __init__(self, mechanism: Mechanism, rate: float, release: int, run: int, seed: int = 0) -> None:
        self.mechanism, self.rate = mechanism, rate
        shapes = mechanism.shapes
        d = sum(s.numel() for s in shapes.values())
        release, run = _fit(d, release, run)
        g = torch.Generator().manual_seed(seed)
        width = max(1, min(SUPPORT, d // (release + run)))
        self.places = torch.randperm(d, generator=g)[: width * (release + run)].view(-1, width)
        self.values = torch.randn(self.places.shape, generator=g)
        self.release, self.run, self.dimension = release, run, d
        self._coins = Stream("audit coins", seed)
        self.run_in = torch.rand(run, generator=g) < 0.5
        self._sampler = PoissonSampler(max(run, 1), max(rate * max(run, 1), 1e-9), seed, "audit canaries")
        self._step = 0
        self._release_scores: list[Tensor] = []
        self._release_in: list[Tensor] = []
        self._run_scores = torch.zeros(run, dtype=torch.float64)
        self._finish = mechanism.finish
        mechanism.finish = self.finish  # type: ignore[method-assign]

    def remove(self) -> None:
        del self.mechanism.finish

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        coins = torch.rand(self.release, generator=self._coins.at(self._step)) < 0.5
        drawn = torch.zeros(self.run, dtype=torch.bool)
        drawn[self._sampler.draw() if self.run else []] = True
        known = self._others()
        self._insert(torch.cat([coins, drawn & self.run_in]))
        released = self._finish(expected_batch)
        scores = self._scores(released, known, expected_batch)
        self._release_scores.append(scores[: self.release])
        self._release_in.append(coins)
        self._run_scores += self._likelihood_ratio(scores[self.release :])
        self._step += 1
        return released

    def _others(self) -> Tensor | float:
        """What everybody else's records add to the release: known to the attacker of one of them."""
        m = self.mechanism
        if isinstance(m, GaussianMechanism):
            return flat({n: m.geometry.inverse(n, m.geometry.forward(n, t)) for n, t in m._sum.items()})
        return 0.0

    def _insert(self, present: Tensor) -> None:
        rows = present.nonzero().flatten()
        if not len(rows):
            return
        flat = torch.zeros(len(rows), self.dimension)
        flat.scatter_(1, self.places[rows], HUGE * self.values[rows])
        like = next(iter(self.mechanism._like.values()))
        dense = {n: g.to(like) for n, g in unflatten(flat, self.mechanism.shapes).items()}
        self.mechanism.accumulate(PerSampleGradients.from_dense(dense))

    def _scores(self, released: dict[str, Tensor], known: Tensor | float, expected_batch: float) -> Tensor:
        """Along each canary, in units of the stated noise: N(0, 1) without it and N(1/σ, 1) with it, if all is as stated."""
        y = flat(released) * expected_batch - known
        if isinstance(self.mechanism, GaussianMechanism):
            stds = [
                torch.as_tensor(self.mechanism.noise_std(n), dtype=torch.float64).cpu() for n in self.mechanism.shapes
            ]
            sizes = self.mechanism.shapes.values()
            noise = torch.cat([s.expand(shape).reshape(-1) for s, shape in zip(stds, sizes)]).clamp(min=1e-12)
        else:  # a release of fixed length: only its direction speaks
            noise = (y.norm() / math.sqrt(self.dimension)).clamp(min=1e-30).expand(self.dimension)
        whitened, direction = (y / noise)[self.places], self.values.double() / noise[self.places]
        return (whitened * direction).sum(1) / direction.norm(dim=1)

    def _likelihood_ratio(self, scores: Tensor) -> Tensor:
        mu = 1.0 / self.mechanism.noise_multiplier if self.mechanism.noise_multiplier > 0 else 1e3
        return likelihood_ratio(scores, torch.tensor(mu, dtype=torch.float64), self.rate)

    @property
    def white(self) -> bool:
        """Whether the stated noise is independent across coordinates, so that scores without a canary are N(0, 1)."""
        geometry = getattr(self.mechanism, "geometry", None)
        return isinstance(self.mechanism, GaussianMechanism) and type(geometry) in (Geometry, Diagonal)

    @property
    def facts(self) -> dict[str, Any]:
        return {"canary": "gradients"}

    def seen(self) -> Seen:
        return Seen(
            torch.cat(self._release_scores).numpy(), torch.cat(self._release_in).numpy(),
            self._run_scores.numpy(), self.run_in.numpy(),
        )  # fmt: skip


def likelihood_ratio(scores: Tensor, mu: Tensor, rate: float) -> Tensor:
    """log of (1 − q)·N(0, 1) + q·N(μ, 1) over N(0, 1): one step of a canary that takes part with probability q."""
    return torch.log1p(rate * torch.expm1((mu * scores - mu * mu / 2).clamp(-50, 50)))


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """One vector in float64, wherever the parameters are."""
    return flatten({n: t.detach().cpu().double() for n, t in tensors.items()})


def _fit(d: int, release: int, run: int) -> tuple[int, int]:
    """No more canaries than coordinates."""
    if release + run > d:
        release = max(1, d * release // (release + run))
        run = d - release
    return release, run


def audit_run(
    session: Any, name: str, *, release: int = 50, run: int = 1000, seed: int = 0, confidence: float = CONFIDENCE,
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:  # fmt: skip
    """Train a fresh `Session` to its end with canaries; bounds on one release and on the whole run."""
    tap = make_tap(session, release, run, seed)
    try:
        for step in range(session.config.steps):
            session.step()
            if progress is not None:
                progress(step + 1, session.config.steps)
    finally:
        tap.remove()
    return conclude_canaries(session, name, tap, confidence)


def make_tap(session: Any, release: int, run: int, seed: int) -> Any:
    """Gradient canaries, or records where the mechanism has a recorder of its own in place of per-sample gradients."""
    if not session.training.mechanism.clips_samples:
        from erlangen.audit.record_canaries import RecordTap

        return RecordTap(session, release, run, seed)
    return CanaryTap(session.training.mechanism, session.sampler.sample_rate, release, run, seed)


def conclude_canaries(session: Any, name: str, tap: Any, confidence: float = CONFIDENCE) -> list[Finding]:
    seen, delta = tap.seen(), session.config.delta
    one, steps = Claim.of(session.training.mechanism.event(), delta), session.step_count
    scores = [seen.release_scores[seen.release_in], seen.release_scores[~seen.release_in]]
    if min(map(len, scores)) < FEWEST:
        few = f"{steps} step(s) with {tap.release} canary(ies) give too few trials: replay a longer run"
        return [unable(name, "release canaries", few)]
    facts = {**tap.facts, "canaries": tap.release, "steps": steps}
    if tap.white:
        facts["noise_upper_limit"] = noise_upper_limit(scores[1], 1 - CONFIDENCE)
    findings = [
        conclude(
            name, "release canaries", evidence(scores[0], scores[1], delta, 1 - confidence), one, trials=len(seen.release_scores),
            facts=facts, confidence=confidence, exact=one.epsilon,
        )
    ]  # fmt: skip
    if tap.white and not one.empty:
        findings.append(noise_finding(name, scores[1]))
    if tap.run:
        findings += _whole_run(session, name, seen, confidence, tap.independent)
    return findings


def noise_finding(name: str, scores: np.ndarray) -> Finding:
    """Scores without a canary are N(0, 1) if the noise is what is stated: Σ score² is then χ², and too small a sum refutes it."""
    from scipy.stats import chi2

    p, limit = float(chi2.cdf(np.square(scores).sum(), len(scores))), noise_upper_limit(scores, 1 - CONFIDENCE)
    facts = {"noise_upper_limit": limit}
    if p <= 1 - CONFIDENCE:
        reason = f"along the canaries there is at most {limit:.3g} of the stated noise (p = {p:.2g})"
        return failed(name, "noise along canaries", reason, len(scores), facts, p)
    return passed(name, "noise along canaries", len(scores), facts, p)


def _whole_run(session: Any, name: str, seen: Seen, confidence: float, independent: bool) -> Iterator[Finding]:
    """Two readings of the run canaries: error rates against the composed subsampled curve, and counted guesses.

    Error rates are binomial only where the scores of canaries are independent of each other.
    """
    delta, steps = session.config.delta, session.step_count
    claim = Claim.of([(session.training.event(), steps)], delta)
    if independent:
        yield _curve(session, name, seen, claim, confidence)
    mu = 2.0 if claim.empty else max(0.05, gdp_mu([(session.training.event(), steps)], delta))
    guesses = guess(seen.run_scores, seen.run_in, best_guesses(len(seen.run_scores), mu, delta))
    facts = {"canaries": len(seen.run_scores)}
    yield conclude_one_run(name, "one run", guesses, claim.epsilon, delta, facts, confidence)


def _curve(session: Any, name: str, seen: Seen, claim: Claim, confidence: float) -> Finding:
    delta, steps, rate = session.config.delta, session.step_count, session.sampler.sample_rate
    order = evidence(seen.run_scores[seen.run_in], seen.run_scores[~seen.run_in], delta, 1 - confidence)
    levels = sorted({*CONFIDENCES, confidence})
    near = Claim.of(session.training.mechanism.event(), delta).sigma or 1.0
    invert = lambda counts, c: subsampled.epsilon_lower(counts, rate, steps, delta, 1 - c, near)  # noqa: E731
    bounds = {level(c): invert(order.balanced, c) for c in levels}
    ceiling = {level(confidence): invert(order.balanced.perfect, confidence)}
    found = conclude(
        name, "run canaries", order, claim, trials=len(seen.run_scores), exact=claim.epsilon, confidence=confidence,
        facts={"rate": rate, "steps": steps},
    )  # fmt: skip
    return dataclasses.replace(found, gdp_lower_bound=bounds, gdp_ceiling=ceiling)
