"""Sessions that are stopped, resumed and started again: noise that is drawn twice must hide the same value twice.

Whoever sees two releases with the same noise and different sums sees the difference of the sums without any. A seeded session
that goes on from a checkpoint draws what it drew before: then batches, gradients and sums must be the same too. Without a seed,
and in secure mode, nothing may come again. Sessions that differ in anything never share noise.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Finding, failed, passed
from erlangen.data import Dataset
from erlangen.mechanisms.noise import NoiseSource
from erlangen.training import checkpoint
from erlangen.training.config import TrainConfig
from erlangen.training.folder import stream_id
from erlangen.training.session import Session

BEFORE, AFTER, UNITS, BATCH = 3, 2, 40, 8


class Overheard(NoiseSource):
    """Another source, with a note of what it was asked to hide and what it added."""

    def __init__(self, inner: NoiseSource, heard: list[tuple[Tensor, Tensor]]) -> None:
        self.inner, self.heard, self.secure, self.description = inner, heard, inner.secure, inner.description

    def next_release(self) -> None:
        self.inner.next_release()

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        noisy = self.inner.perturb(value, std)
        self.heard.append((value.detach().clone(), ((noisy - value).double() / std).flatten()))
        return noisy

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


@dataclass(frozen=True)
class Life:
    """What one session's noise was asked to hide, step by step, and the noise."""

    name: str
    heard: list[tuple[Tensor, Tensor]]


def records() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((UNITS, 1, 8, 8)).astype(np.float32)
    return Dataset("audit", x, np.arange(UNITS) % 3, None, None, 3)


def lived(
    name: str, options: Mapping[str, Any], steps: int, saved: Path | None = None, kind: type[Session] = Session
) -> tuple[Life, Session]:
    """A session as a run makes it, from the beginning or from a checkpoint."""
    common = {
        "model": "mlp", "model_options": {"width": 8}, "epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "batch": BATCH,
        "steps": 20, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    config, data = TrainConfig(**{**common, **options}), records()
    session = kind(config, data, run_id=stream_id(config, data))
    heard: list[tuple[Tensor, Tensor]] = []
    session.training.mechanism.noise = Overheard(session.training.mechanism.noise, heard)
    if session.judge is not None:
        session.judge.selective.noise = Overheard(session.judge.selective.noise, heard)
    if saved is not None:
        session.load_state_dict(checkpoint.load(saved))
    for _ in range(steps):
        session.step()
    return Life(name, heard), session


def lives(options: Mapping[str, Any], kind: type[Session] = Session) -> Iterator[Life]:
    """The same options: stopped and resumed twice from one checkpoint, started again, and with one option changed."""
    first, session = lived("the first life", options, BEFORE, kind=kind)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "checkpoint.safetensors"
        checkpoint.save(saved, session.state_dict())
        for _ in range(AFTER):
            session.step()
        yield first
        for name in ("resumed", "resumed once more"):
            yield lived(name, options, AFTER, saved, kind)[0]
    changed = {"started again": {}, "with another bound": {"max_grad_norm": 0.5}, "with another rate": {"lr": 0.2}}
    for name, change in changed.items():
        yield lived(name, {**options, **change}, BEFORE + AFTER, kind=kind)[0]


def same_noise(x: Tensor, y: Tensor) -> bool:
    """Ten standard errors of a correlation: chance does not do that. Short draws must be equal."""
    if x.shape != y.shape or not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
        return False
    if x.numel() < 30:
        return bool(torch.equal(x, y)) and bool(x.abs().sum() > 0)
    r = float(x @ y / (x.norm() * y.norm()).clamp(min=1e-30))
    return abs(r) * math.sqrt(x.numel()) > 10.0


@single_threaded
def audit_restarts(name: str, options: Mapping[str, Any], kind: type[Session] = Session) -> Finding:
    """Every two draws of every two lives: the same noise only around the same value, and never without a seed."""
    every = [
        (life.name, k, value, noise) for life in lives(options, kind) for k, (value, noise) in enumerate(life.heard)
    ]
    seeded, tried = options.get("seed") is not None, 0
    for (a, i, value, noise), (b, j, other, again) in combinations(every, 2):
        tried += 1
        if not same_noise(noise, again):
            continue
        where = f"draw {i + 1} ({a}) and draw {j + 1} ({b})"
        if not seeded:
            return failed(name, "restart", f"noise is used again without a seed: {where}", tried)
        if value.shape != other.shape or not torch.equal(value, other):
            return failed(name, "restart", f"the same noise hides two different values: {where}", tried)
    return passed(name, "restart", tried)


def restart_cases() -> dict[str, dict[str, Any]]:
    """Sources of randomness × what else is drawn."""
    sources: dict[str, dict[str, Any]] = {"seeded": {"seed": 3}, "unseeded": {}, "secure": {"secure": True}}
    beside: dict[str, dict[str, Any]] = {
        "": {}, ", importance": {"sampling": "importance"}, ", selective": {"selective": True},
        ", adaptive clipping": {"clipping": "adaptive"}, ", views": {"views": 2, "augment": "shift"},
        ", both companions, parts": {"sampling": "importance", "selective": True, "max_physical_batch": 3},
    }  # fmt: skip
    return {f"{s} session{b}": {**source, **more} for s, source in sources.items() for b, more in beside.items()}


__all__ = ["Life", "Overheard", "audit_restarts", "lives", "restart_cases", "same_noise"]
