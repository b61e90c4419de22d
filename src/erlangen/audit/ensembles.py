"""Ensembles clip, sum and add noise in code of their own (`training.stacked_release`), and draw batches by one of their own.

The same questions as for a mechanism: one record moves the sums by at most what is claimed, whatever it holds; the noise that is
added is the noise that was stated, new for every member and step; nobody else's sum moves. Each registered mechanism is tried;
one that an ensemble refuses has nothing to audit here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from erlangen.accounting import poisson
from erlangen.audit.randomness import judged
from erlangen.audit.sessions import SLACK, hostile_images, records, without_last
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Claim, Finding, failed, passed
from erlangen.data import Dataset
from erlangen.streams import Stream
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.padding import PoissonProcess
from erlangen.training.stacked_release import StackedDirection

MEMBERS, ROWS, BATCH, SILENT_STEPS = 2, 8, 4, 12


def built(options: Mapping[str, Any], dataset: Dataset, everybody: bool = True) -> Ensemble:
    """Two members that draw every record at every step, or none."""
    common = {
        "model": "cnn", "model_options": {"width": 8}, "epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "batch": BATCH,
        "steps": SILENT_STEPS, "lr": 1.0, "momentum": 0.0, "ema": 0.0, "max_grad_norm": 0.7, "device": "cpu",
    }  # fmt: skip
    configs = [TrainConfig(**{**common, **options, "seed": seed}) for seed in range(MEMBERS)]
    batch = np.arange(len(dataset) if everybody else 0)
    draws: list[Callable[[int], list[np.ndarray]]] = [lambda steps: [batch] * steps] * MEMBERS
    plain = Dataset("audit", dataset.x_train, dataset.y_train, None, None, dataset.classes)
    return Ensemble(configs, plain, draws=draws, rows=ROWS)


def summed(ensemble: Ensemble) -> Ensemble:
    """After all passes of one step, before its noise."""
    table, passes = ensemble.batches.draw(1)
    ensemble._load(table)
    for _ in range(int(passes[0])):
        ensemble._accumulate()
    return ensemble


@torch.no_grad()
def distances(a: Ensemble, b: Ensemble) -> Tensor:
    """How far apart what two ensembles are about to release is, in units of its noise: one number for each member."""
    gap = a.total.double() - b.total.double()
    if isinstance(a.family, StackedDirection):
        count = a.family.state["magnitude"].double() - b.family.state["magnitude"].double()
        both = (gap / a.family.direction_std).square().sum(1) + (count / a.family.magnitude_std).square().sum(1)
        return both.sqrt()
    # the rest is linear: with the same noise, releases differ by what the geometry lets through
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    one, two = (e.family.release(e.total.clone(), 1.0, generator()).double() for e in (a, b))
    return whitened(a.family, one - two).square().sum(1).sqrt()


def whitened(family: Any, x: Tensor) -> Tensor:
    """x [E, d] in units of the noise: of its own scale on even and odd sequences where it is not white."""
    if family.turn is None:
        return x / family.std
    turned = x.index_select(1, family.turn)
    return (x + turned) / (2 * (family.std + family.turned_std)) + (x - turned) / (2 * (family.std - family.turned_std))


@single_threaded
def audit_ensemble(name: str, options: Mapping[str, Any], seen: set[type] | None = None) -> Finding | None:
    """Sensitivity under hostile records, then the noise of empty batches; None where no ensemble has this mechanism.

    ``seen`` collects the classes that did the work.
    """
    worst, tried = 0.0, 0
    try:
        first = built(options, records(torch.zeros(1, 8, 8), 6))
    except (ConfigError, TypeError, ValueError):
        return None
    if seen is not None:
        seen.add(type(first.family))
    claim = Claim.of(first.mechanisms[0].event(), 1e-5)
    if claim.empty:
        return passed(name, "ensemble", facts={"note": "nothing is claimed (ε = ∞)"})
    assert claim.sigma is not None
    for label, image in list(hostile_images())[1:6:2]:
        data = records(image, 6)
        pair = (summed(built(options, d)) for d in (data, without_last(data, unit=False)))
        found = float((distances(*pair) * claim.sigma).nan_to_num(math.inf).max())
        tried, worst = tried + 1, max(worst, found)
        if not found <= 1 + SLACK:
            reason = f"one record moves a member's step by {found:.5g} times the claimed sensitivity ({label})"
            return failed(name, "ensemble", reason, tried)
    return judged(name, "ensemble", silent(options), tried, {"sensitivity": worst})


def silent(options: Mapping[str, Any]) -> dict[str, float]:
    """p-values of what is released of empty batches: as much noise as stated, new for every member and step."""
    ensemble = built(options, records(torch.zeros(1, 8, 8), 6), everybody=False)
    steps, before = [], ensemble.stack.flat.clone()
    drawn: list[Tensor] = []
    plain = ensemble.family.noise
    ensemble.family.noise = lambda like, generator: _noted(drawn, plain(like, generator))  # type: ignore[method-assign]
    for _ in range(SILENT_STEPS):
        ensemble.run(1)
        steps.append((before - ensemble.stack.flat).double() * BATCH)
        before = ensemble.stack.flat.clone()
    z = torch.cat([d.flatten().double() for d in drawn]).numpy()
    q = float(stats.chi2.cdf((z**2).sum(), z.size))
    p = {
        "noise has the wrong variance": 2 * min(q, 1 - q),
        "noise is not normal": float(stats.kstest(z[:20000], "norm").pvalue),
    }
    first, later = drawn[0].double(), next(d for d in drawn[1:] if d.shape == drawn[0].shape).double()
    for label, x, y in (("members share noise", first[0], first[1]), ("steps share noise", first[0], later[0])):
        r = float(x @ y / (x.norm() * y.norm()).clamp(min=1e-30))
        p[label] = float(2 * stats.norm.sf(abs(r) * math.sqrt(x.numel())))
    if not isinstance(ensemble.family, StackedDirection) and not ensemble.family.frames:  # type: ignore[attr-defined]
        released = torch.stack([whitened(ensemble.family, step) for step in steps])
        q = float(stats.chi2.cdf(float(released.square().sum()), released.numel()))
        p["less noise is released than stated"] = 2 * min(q, 1 - q)
    return p


def _noted(drawn: list[Tensor], noise: Tensor) -> Tensor:
    drawn.append(noise.clone())
    return noise


class Process:
    """An ensemble's Poisson process, seen as a sampler."""

    def __init__(self, units: int, batch: float, seed: int | None, run: str) -> None:
        self.q, self.steps_per_epoch = batch / units, max(1, round(units / batch))
        self.process = PoissonProcess(units, batch, Stream("sampling", seed, run))

    def draw(self) -> Tensor:
        return torch.from_numpy(self.process.draw(1)[0])

    def event(self, release: Any) -> Any:
        return poisson(self.q, release)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.process.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.process.step = int(state["step"])
        self.process._held = self.process._block(self.process.step // self.process.BLOCK)


__all__ = ["Process", "audit_ensemble", "built", "distances", "silent", "summed"]
