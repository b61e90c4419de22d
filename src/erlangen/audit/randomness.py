"""Noise sources and samplers: do they draw what their accounting assumes, and never the same twice?

Tests of randomness are statistics with p-values; those of one object are combined by Holm at the confidence of the audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats

from erlangen.accounting import gaussian
from erlangen.audit.intervals import holm
from erlangen.audit.verdict import CONFIDENCE, Finding, failed, passed, unable
from erlangen.mechanisms.noise import NoiseSource
from erlangen.sampling.samplers import Sampler

#: (seed, run id, rank) → a source
MakeNoise = Callable[[int | None, str, int], NoiseSource]
#: (units, expected batch, seed, run id) → a sampler
MakeSampler = Callable[[int, float, int | None, str], Sampler]


def judged(name: str, audit: str, p: dict[str, float], trials: int, facts: dict[str, Any]) -> Finding:
    adjusted = dict(zip(p, holm(list(p.values()))))
    worst = min(adjusted, key=lambda k: adjusted[k])
    facts = {**facts, "p_values": {k: float(v) for k, v in p.items()}}
    if adjusted[worst] <= 1 - CONFIDENCE:
        return failed(name, audit, f"{worst} (p = {adjusted[worst]:.2g})", trials, facts, adjusted[worst])
    return passed(name, audit, trials, facts, adjusted[worst])


# --- noise -----------------------------------------------------------------------------------------------------------


def _blocks(make: MakeNoise, size: int, ranks: int) -> dict[str, torch.Tensor]:
    """Noise drawn in every situation in which it must be new; ``ranks`` processes share a seed and a run."""

    def draw(source: NoiseSource) -> torch.Tensor:
        return source.perturb(torch.zeros(size, dtype=torch.float64), 1.0)

    blocks: dict[str, torch.Tensor] = {}
    first = make(7, "run", 0)
    for step in range(3):
        first.next_release()
        blocks[f"step {step}, first layer"] = draw(first)
        blocks[f"step {step}, second layer"] = draw(first)
    resumed = make(7, "run", 0)
    resumed.load_state_dict(first.state_dict())
    for label, source in {
        "after a restart": resumed,
        **{f"rank {rank}": make(7, "run", rank) for rank in range(1, ranks)},
        "another run": make(7, "other run", 0),
        "another seed": make(8, "run", 0),
        "no seed": make(None, "run", 0),
        "no seed again": make(None, "run", 0),
    }.items():
        source.next_release()
        blocks[label] = draw(source)
    return blocks


def audit_noise(
    name: str, make: MakeNoise, size: int = 4000, ranks: int = 4, beside: Mapping[str, NoiseSource] | None = None
) -> Finding:
    """Gaussian, white, centred on the value, and new across steps, layers, ranks, runs and restarts.

    ``ranks=1`` is for a source that only one process has. It must share nothing with the sources ``beside`` it either.
    """
    blocks = _blocks(make, size, ranks)
    for label, source in (beside or {}).items():
        source.next_release()
        blocks[label] = source.perturb(torch.zeros(size, dtype=torch.float64), 1.0)
    p = {f"noise of '{a}' is noise of '{b}' again": _correlation(x, y) for (a, x), (b, y) in _pairs(blocks)}
    z = blocks["step 0, first layer"].numpy()
    source = make(3, "moments", 0)
    source.next_release()
    std = torch.tensor([0.5, 2.0], dtype=torch.float64).repeat(size // 2)
    value = torch.full((size,), 1e3, dtype=torch.float64)
    scaled = ((source.perturb(value, std) - value) / std).numpy()
    for label, x in {"a number": z, "a tensor": scaled}.items():
        p |= {
            f"noise with {label} as scale is not standard normal": float(stats.kstest(x, "norm").pvalue),
            f"noise with {label} as scale has the wrong variance": _variance(x),
            f"noise with {label} as scale has the wrong tails": _tails(x),
            f"noise with {label} as scale is not white": _correlation(
                torch.from_numpy(x[:-1]), torch.from_numpy(x[1:])
            ),
        }
    return judged(name, "noise", p, size * len(blocks), {"description": make(None, "", 0).description})


def _pairs(blocks: dict[str, torch.Tensor]) -> list[Any]:
    items = list(blocks.items())
    return [(x, y) for i, x in enumerate(items) for y in items[i + 1 :]]


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Two-sided p-value of independence of standard normals."""
    r = float(x @ y / (x.norm() * y.norm()).clamp(min=1e-30))
    return float(2 * stats.norm.sf(abs(r) * math.sqrt(x.numel())))


def _variance(x: np.ndarray) -> float:
    q = float(stats.chi2.cdf((x**2).sum(), x.size))
    return 2 * min(q, 1 - q)


def _tails(x: np.ndarray) -> float:
    """Two-sided p-value of the largest |x|: all of them lie below m with probability (2Φ(m) − 1)ⁿ."""
    q = float((2 * stats.norm.cdf(np.abs(x).max()) - 1) ** x.size)
    return 2 * min(q, 1 - q)


# --- samplers --------------------------------------------------------------------------------------------------------


def audit_sampler(
    name: str, make: MakeSampler, units: int = 50, rate: float = 0.06, steps: int = 4000,
    beside: Mapping[str, MakeSampler] | None = None,
) -> Finding:  # fmt: skip
    """Against what the sampler's own event claims: Poisson inclusion at a rate, or nothing.

    Samplers ``beside`` it, of the same seed and run, must not draw the same batches.
    """
    sampler = make(units, units * rate, 5, "run")
    event, release = sampler.event(gaussian(1.0)), gaussian(1.0)
    drawn = torch.zeros(steps, units, dtype=torch.float64)
    for step in range(steps):
        batch = sampler.draw()
        if batch.numel() and (
            int(batch.min()) < 0 or int(batch.max()) >= units or batch.unique().numel() < batch.numel()
        ):
            return failed(
                name, "sampler", f"a batch holds a record twice, or none of the {units}: {batch.tolist()[:10]}"
            )
        drawn[step, batch] = 1.0
    facts = {"event": repr(event), "rate": float(drawn.mean()), "empty_batches": int((drawn.sum(1) == 0).sum())}
    if event == release:
        return passed(name, "sampler", steps, facts)
    if type(event).__name__ != "PoissonSampledDpEvent":
        return unable(name, "sampler", f"the sampler claims {event!r}; this audit knows Poisson sampling")
    q = event.sampling_probability
    if event.event != release:
        return failed(name, "sampler", f"the sampler changed the release it wraps: {event.event!r}")
    twins = {"another run draws the same batches": make(units, units * rate, 5, "other run")}
    resumed = make(units, units * rate, 5, "run")
    resumed.load_state_dict(sampler.state_dict())
    twins["batches repeat after a restart"] = resumed
    twins |= {label: build(units, units * rate, 5, "run") for label, build in (beside or {}).items()}
    p = poisson_tests(drawn.numpy(), q, sampler.steps_per_epoch)
    for label, twin in twins.items():
        again = torch.zeros(200, units, dtype=torch.float64)
        for step in range(200):
            again[step, twin.draw()] = 1.0
        scale = math.sqrt(q * (1 - q))
        p[label] = dependence(((drawn[:200] - q) / scale).numpy(), ((again - q) / scale).numpy())
    for few, size in ODD_SIZES:
        told = f"records are not drawn at the claimed rate ({few} units, batch {size:g})"
        p[told] = _rate_at(make, few, size, steps // 2)
    return judged(name, "sampler", p, steps, facts)


#: (units, expected batch) that do not divide: a rate of whole batches shows here
ODD_SIZES = ((7, 5.0), (11, 4.0))


def _rate_at(make: MakeSampler, units: int, batch: float, steps: int) -> float:
    """Two-sided p-value of the claimed rate at another size."""
    sampler = make(units, batch, 5, "run")
    q = getattr(sampler.event(gaussian(1.0)), "sampling_probability", 1.0)
    total = sum(len(sampler.draw()) for _ in range(steps))
    return float(stats.binomtest(total, steps * units, q).pvalue)


def poisson_tests(drawn: np.ndarray, q: float | np.ndarray, period: int) -> dict[str, float]:
    """p-values of a [steps, units] table of inclusions: rate, each record's rate, independence in both directions, empties.

    ``q`` is the rate of every record, or one rate for each.
    """
    steps, units = drawn.shape
    q = np.broadcast_to(np.asarray(q, dtype=np.float64), (units,))
    v = q * (1 - q)
    standard, sizes = (drawn - q) / np.sqrt(v), drawn.sum(1)
    fourth = 3 * v.sum() ** 2 + (v * (1 - 6 * v)).sum()  # E(size − Σq)⁴ of a sum of independent coins
    spread = ((sizes - q.sum()) ** 2).mean()
    p = {
        "records are not drawn at the claimed rate": _two_sided(
            (drawn.sum() - steps * q.sum()) / math.sqrt(steps * v.sum())
        ),
        "some records are drawn more often than others": float(
            stats.chi2.sf((((drawn.sum(0) - steps * q) ** 2) / (steps * v)).sum(), units)
        ),
        "records are not drawn independently (batch sizes)": _two_sided(
            (spread - v.sum()) / math.sqrt((fourth - v.sum() ** 2) / steps)
        ),
        "neighbouring records are not drawn independently": dependence(standard[:, :-1], standard[:, 1:]),
        "empty batches do not occur as often as they should": float(
            stats.binomtest(int((sizes == 0).sum()), steps, float(np.prod(1 - q))).pvalue
        ),
    }
    for lag in sorted({1, max(1, period - 1), period, 2 * period}):
        if lag < steps:
            p[f"draws {lag} step(s) apart are not independent"] = dependence(standard[:-lag], standard[lag:])
    return p


def _two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


def dependence(x: np.ndarray, y: np.ndarray) -> float:
    """Two-sided p-value that products of standardised inclusions average to zero."""
    return _two_sided(float((x * y).sum()) / math.sqrt(x.size))
