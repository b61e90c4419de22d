"""A run and its folder: configuration, metrics line by line, weights, summary."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import erlangen
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.session import Session

#: called after each step with the session and what is known so far
Watcher = Callable[[Session, dict[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """What a run leaves: the summary (also ``summary.json``) and the session with the trained model."""

    summary: dict[str, Any]
    session: Session
    folder: Path | None


def train(
    config: TrainConfig, out: str | Path | None = None, overwrite: bool = False, watch: Watcher | None = None
) -> Result:
    """Train privately. With ``out`` everything is written there; the summary says what was guaranteed."""
    folder = open_folder(out, overwrite) if out is not None else None
    session = Session(config, run_id=folder.name if folder else "")
    if folder:
        (folder / "config.json").write_text(session.config.to_json() + "\n")
    started, metrics = time.perf_counter(), {}
    for step in range(session.config.steps):
        session.step()
        if is_evaluation(session.config, step):
            metrics = {"step": step + 1, "epsilon": session.epsilon(), **session.evaluate()}
            if folder:
                append_line(folder / "metrics.jsonl", metrics)
        if watch is not None:
            watch(session, metrics)
    summary = summarise(session, metrics, time.perf_counter() - started)
    if folder:
        save_file({k: t.contiguous() for k, t in session.weights().items()}, str(folder / "weights.safetensors"))
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return Result(summary, session, folder)


def is_evaluation(config: TrainConfig, step: int) -> bool:
    """``evaluations`` times, evenly, the last step included."""
    return (step + 1) * config.evaluations // config.steps > step * config.evaluations // config.steps


def open_folder(out: str | Path, overwrite: bool) -> Path:
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise ConfigError(f"{folder} holds a run already; choose another --out, or pass --overwrite")
        if not (folder / "config.json").exists():
            raise ConfigError(f"{folder} is not empty and holds no run: refusing to overwrite it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def append_line(path: Path, values: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def summarise(session: Session, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Facts only: test metrics, the guarantee by both accountants, what it rests on, what it does not cover."""
    config, mechanism = session.config, session.training.mechanism
    guarantee = {
        "epsilon": {method: _number(session.epsilon(method)) for method in ("pld", "rdp")},
        "delta": config.delta,
        "neighbouring": mechanism.neighbouring,
        "unit": session.units.name,
        "sampler": session.sampler.describe(),
        "mechanism": mechanism.describe(),
        "steps": session.step_count,
    }
    return {
        "test": {k: v for k, v in metrics.items() if k not in ("step", "epsilon")},
        "guarantee": guarantee,
        "data": {"name": session.dataset.name, "records": len(session.dataset), "fingerprint": session.dataset.fingerprint()},
        "parameters": sum(p.numel() for p in session.model.parameters() if p.requires_grad),
        "randomness": mechanism.noise.description,
        "non_private": [],
        "seconds": round(seconds, 2),
        "versions": {"erlangen": erlangen.__version__, "torch": torch.__version__},
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def in_plain_words(summary: dict[str, Any]) -> str:
    """The guarantee as a sentence for somebody who does not know the field."""
    guarantee = summary["guarantee"]
    epsilon, delta = guarantee["epsilon"]["pld"], guarantee["delta"]
    whose = "record" if guarantee["unit"] == "record" else f"{guarantee['unit']} (all their records together)"
    if epsilon == "inf":
        why = guarantee["mechanism"]["guarantee"]
        reason = "no noise was added (σ = 0)" if why == "sound" else why
        return f"No privacy guarantee: ε = ∞, because {reason}."
    odds = math.exp(epsilon)
    return (
        f"ε = {epsilon:.3g} at δ = {delta:.1e} for each {whose}. Whoever sees the trained model, and knows everything "
        f"about everyone else, can raise the odds that a given {whose.split(' ')[0]} was in the training data by at most a "
        f"factor {odds:.3g}, except with probability {delta:.1e}."
    )
