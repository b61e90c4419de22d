"""How good the audits themselves are: power where the truth is known, and false alarms on what is sound."""

from __future__ import annotations

from collections.abc import Iterable
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
from erlangen.audit.recipes import Recipe
from erlangen.audit.verdict import VIOLATED, Finding, gaussian_epsilon
from erlangen.mechanisms import StreamNoise
from erlangen.sampling import PoissonSampler

#: confidence of the audits whose false alarms are counted
STATED = 0.95
#: true ε at which the power is measured
TRUTHS = (1.0, 2.0, 4.0, 8.0)


def power_at(epsilon: float, repetitions: int = 20, runs: int = 1000, seed: int = 0) -> dict[str, float]:
    """Median lower bounds at a true ε, at 95 %: GDP from ``runs`` runs in each world, and one run with 1000 canaries."""
    rng = np.random.default_rng([seed, round(epsilon)])
    draw = lambda mu: evidence(rng.normal(mu, 1, runs), rng.normal(0, 1, runs), 1e-5, 0.05)  # noqa: E731
    mu = 1.0 / accounting.noise_multiplier(epsilon, 1e-5, 1.0, 1)
    gdp, one_run = [], []
    made = best_guesses(1000, mu, 1e-5)
    for _ in range(repetitions):
        gdp.append(gaussian_epsilon(gdp_lower(draw(mu).balanced, 0.05), 1e-5))
        included = rng.random(1000) < 0.5
        one_run.append(guess(rng.normal(0, 1, 1000) + mu * included, included, made).epsilon_lower(1e-5, 0.05))
    over = sum(gdp_refuted(draw(mu).balanced, mu, 0.05) for _ in range(20 * repetitions))
    return {"epsilon": epsilon, "gdp": float(np.median(gdp)), "one_run": float(np.median(one_run)),
            "above_truth": over / (20 * repetitions)}  # fmt: skip


def alarms(repetitions: Iterable[int], trials: int = 600) -> int:
    """How often a sound mechanism (ISO, real code, exactly its claim) is called violated at 95 %."""
    count = 0
    for k in repetitions:
        subject = Recipe("iso", {}, seed=k).subject()
        pairs = portfolio(subject.shapes)[:2]
        count += audit_releases(subject, trials, pairs=pairs, pilot=60, confidence=STATED).verdict == VIOLATED
    return count


def monte_carlo_rate(count: int, repetitions: int) -> dict[str, Any]:
    return _rate("Monte Carlo, ISO at exactly its claim", 1 - STATED, count, repetitions)


def false_alarms_of_randomness(repetitions: int = 200) -> list[dict[str, Any]]:
    """How often the library's own noise and Poisson sampler fail their tests at the stated confidence."""
    noise, sampler = 0, 0
    for k in range(repetitions):
        noise += _rejected(audit_noise("noise", partial(_stream, k), 1000))
        sampler += _rejected(audit_sampler("sampler", partial(_poisson, k), steps=1000))
    return [
        _rate("noise of streams", 1 - STATED, noise, repetitions),
        _rate("Poisson sampler", 1 - STATED, sampler, repetitions),
    ]


def _stream(k: int, seed: int | None, run: str, rank: int) -> StreamNoise:
    return StreamNoise(seed, f"{k} {run}", rank)


def _poisson(k: int, units: int, batch: float, seed: int | None, run: str) -> PoissonSampler:
    return PoissonSampler(units, batch, seed, f"{k} {run}")


def _rejected(found: Finding) -> bool:
    return found.p_value is not None and found.p_value <= 1 - STATED


def _rate(audit: str, stated: float, alarms: int, repetitions: int) -> dict[str, Any]:
    return {"audit": audit, "stated": stated, "measured": alarms / repetitions, "repetitions": repetitions}
