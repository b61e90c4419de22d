"""How good the audits themselves are: power where the truth is known, and false alarms on what is sound."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from erlangen import accounting
from erlangen.audit.distinguish import evidence
from erlangen.audit.intervals import gdp_lower, gdp_refuted
from erlangen.audit.montecarlo import audit_releases
from erlangen.audit.neighbours import portfolio
from erlangen.audit.one_run import best_guesses, guess
from erlangen.audit.randomness import audit_noise, audit_sampler
from erlangen.audit.static import Recipe
from erlangen.audit.verdict import VIOLATED, Finding, gaussian_epsilon
from erlangen.mechanisms import StreamNoise
from erlangen.sampling import PoissonSampler


def power(repetitions: int = 20, runs: int = 1000, seed: int = 0) -> list[dict[str, float]]:
    """Median lower bounds at true ε = 1, 2, 4, 8: GDP from ``runs`` runs in each world, one run with 1000 canaries. At 95 %."""
    rng, out = np.random.default_rng(seed), []
    draw = lambda mu: evidence(rng.normal(mu, 1, runs), rng.normal(0, 1, runs), 1e-5, 0.05)  # noqa: E731
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        mu = 1.0 / accounting.noise_multiplier(epsilon, 1e-5, 1.0, 1)
        gdp, one_run = [], []
        made = best_guesses(1000, mu, 1e-5)
        for _ in range(repetitions):
            seen = draw(mu)
            gdp.append(gaussian_epsilon(gdp_lower(seen.balanced, 0.05), 1e-5))
            included = rng.random(1000) < 0.5
            one_run.append(guess(rng.normal(0, 1, 1000) + mu * included, included, made).epsilon_lower(1e-5, 0.05))
        over = sum(gdp_refuted(draw(mu).balanced, mu, 0.05) for _ in range(20 * repetitions))
        out.append({"epsilon": epsilon, "gdp": float(np.median(gdp)), "one_run": float(np.median(one_run)),
                    "above_truth": over / (20 * repetitions)})  # fmt: skip
    return out


def false_alarms(repetitions: int = 400, trials: int = 600, confidence: float = 0.95) -> dict[str, Any]:
    """How often a sound mechanism (ISO, real code, exactly its claim) is called violated at a stated ``confidence``."""
    alarms = 0
    for k in range(repetitions):
        subject = Recipe("iso", {}, seed=k).subject()
        found = audit_releases(subject, trials, pairs=_one_pair(subject), pilot=60, confidence=confidence)
        alarms += found.verdict == VIOLATED
    return _rate("Monte Carlo, ISO at exactly its claim", 1 - confidence, alarms, repetitions)


def false_alarms_of_randomness(repetitions: int = 200, confidence: float = 0.95) -> list[dict[str, Any]]:
    """How often the library's own noise and Poisson sampler fail their tests at a stated ``confidence``."""
    noise, sampler = 0, 0
    for k in range(repetitions):
        noise += _rejected(audit_noise("noise", partial(_stream, k), 1000), confidence)
        sampler += _rejected(audit_sampler("sampler", partial(_poisson, k), steps=1000), confidence)
    return [
        _rate("noise of streams", 1 - confidence, noise, repetitions),
        _rate("Poisson sampler", 1 - confidence, sampler, repetitions),
    ]


def _stream(k: int, seed: int | None, run: str, rank: int) -> StreamNoise:
    return StreamNoise(seed, f"{k} {run}", rank)


def _poisson(k: int, units: int, batch: float, seed: int | None, run: str) -> PoissonSampler:
    return PoissonSampler(units, batch, seed, f"{k} {run}")


def _rejected(found: Finding, confidence: float) -> bool:
    return found.p_value is not None and found.p_value <= 1 - confidence


def _rate(audit: str, stated: float, alarms: int, repetitions: int) -> dict[str, Any]:
    return {"audit": audit, "stated": stated, "measured": alarms / repetitions, "repetitions": repetitions}


def _one_pair(subject: Any) -> list[Any]:
    return portfolio(subject.shapes)[:2]
