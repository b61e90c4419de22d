"""A run and its folder: configuration, ledger, metrics, checkpoint, weights, summary, certificate.

config.json           every option, settled
ledger.jsonl (+.copy) what has been released, written before it is used
metrics.jsonl         public test metrics and ε, line by line
checkpoint.safetensors  everything a resumed run needs; never a seed
weights.safetensors   the released weights
public.safetensors    predictions on the public test set, and a few of its images
summary.json, certificate.json, certificate.md
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

import erlangen
from erlangen.accounting import Budget, certificate
from erlangen.accounting.ledger import Ledger, Release
from erlangen.training import checkpoint
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.session import Session

#: called after each step with the session and what is known so far
Watcher = Callable[[Session, dict[str, Any]], None]


class Interrupted(Exception):
    """The user stopped the run; it can be resumed."""


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
    if out is None:
        return _run(Session(config), None, None, watch)
    folder = open_folder(out, overwrite)
    session = Session(config, run_id=folder.name)
    write(folder / "config.json", session.config.to_json() + "\n")
    fingerprint = session.dataset.fingerprint()
    with Ledger.create(folder / "ledger.jsonl", data=fingerprint, run=folder.name, unit=session.units.name) as ledger:
        return _run(session, folder, ledger, watch)


def resume(folder: str | Path, watch: Watcher | None = None, **changes: Any) -> Result:
    """Go on where a run stopped, also on another device or with another physical batch size (``changes``)."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no run to resume: there is no config.json")
    not_allowed = set(changes) - {"device", "max_physical_batch"}
    if not_allowed:
        raise ConfigError(f"{', '.join(sorted(not_allowed))} cannot change in a resumed run; start a new one")
    session = Session(replace(TrainConfig.from_file(folder / "config.json"), **changes), run_id=folder.name)
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        if ledger.book.data != session.dataset.fingerprint():
            raise ConfigError(f"the data is not what {folder} was trained on: its fingerprint differs")
        saved = folder / "checkpoint.safetensors"
        if saved.exists():
            state = checkpoint.load(saved)
            if not ledger.contains(state.get("ledger", {})):
                raise ConfigError(
                    f"{saved} does not belong to the ledger beside it: one of them was replaced or rolled back"
                )
            session.load_state_dict(state)
        for event, count in ledger.pairs():
            session.accountant.record(event, count)
        return _run(session, folder, ledger, watch)


def _run(session: Session, folder: Path | None, ledger: Ledger | None, watch: Watcher | None) -> Result:
    started = time.perf_counter()
    metrics: dict[str, Any] = {}
    last = session.step_count + allowed_steps(session, ledger)
    if ledger is not None:
        _write_ahead(session, ledger, last)
    with stop_requests() as asked:
        while session.step_count < last:
            session.step()
            if is_evaluation(session.config, session.step_count) or session.step_count == last:
                metrics = _record(session, folder, ledger)
            if watch is not None:
                watch(session, metrics)
            if asked and session.step_count < last:
                _record(session, folder, ledger)
                raise Interrupted(
                    f"stopped after step {session.step_count}; go on with: erlangen train --resume {folder}"
                )
    metrics = metrics or _record(session, folder, ledger)
    summary = summarise(session, metrics, time.perf_counter() - started)
    if folder is not None and ledger is not None:
        ledger.settle()
        _leave(session, folder, ledger, summary)
    return Result(summary, session, folder)


def _record(session: Session, folder: Path | None, ledger: Ledger | None) -> dict[str, Any]:
    """Metrics of this moment, and a checkpoint of it."""
    metrics: dict[str, Any] = {"step": session.step_count, "epsilon": _number(session.epsilon()), **session.evaluate()}
    if session.config.non_private:
        metrics["non_private"] = dict(session.non_private)
    if folder is not None and ledger is not None:
        append_line(folder / "metrics.jsonl", metrics)
        checkpoint.save(folder / "checkpoint.safetensors", {**session.state_dict(), "ledger": ledger.head})
    return metrics


def allowed_steps(session: Session, ledger: Ledger | None) -> int:
    """The steps still planned, or fewer if the budget does not reach: training stops *before* it would be exceeded."""
    config = session.config
    planned = config.steps - session.step_count
    if ledger is None or config.epsilon is None or planned <= 0:
        return max(0, planned)
    assert config.delta is not None
    event, history = session.training.event(), ledger.pairs()
    budget = Budget(config.epsilon, config.delta)
    if budget.allows(event, history, planned):
        return planned
    return min(planned, budget.steps_left(event, history))


def _write_ahead(session: Session, ledger: Ledger, last: int) -> None:
    """From now on no noisy gradient is used before its release is on disk."""
    mechanism = session.training.mechanism
    release = Release(
        session.training.event(),
        sensitivity=mechanism.sensitivity,
        sigma_eff=mechanism.noise_multiplier,
        sample_rate=session.sampler.sample_rate,
        unit=session.units.name,
        mechanism=mechanism.name,
        reason=mechanism.unsound or ("no noise is added (σ = 0)" if mechanism.noise_multiplier == 0 else None),
    )
    ledger.limit = last - session.step_count
    session.training.before_release.append(
        lambda event: ledger.spend(release if event == release.event else replace(release, event=event, sigma_eff=None))
    )


def _leave(session: Session, folder: Path, ledger: Ledger, summary: dict[str, Any]) -> None:
    weights = {k: t.detach().cpu().contiguous() for k, t in session.weights().items()}
    checkpoint.write_atomically(folder / "weights.safetensors", to_bytes(weights))
    public = session.public_predictions()
    if public is not None:
        public.save(folder)
    write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_certificate(session, folder, ledger)


def write_certificate(session: Session, folder: Path, ledger: Ledger) -> None:
    """``certificate.json`` and its one-page rendering, from the ledger and the facts of the run."""
    config, mechanism = session.config, session.training.mechanism
    audited = folder / "audit.json"
    assert config.delta is not None
    document = certificate.build(ledger.book, config.delta, {
        "sampler": session.sampler.describe(),
        "mechanism": mechanism.describe(),
        "data_size": len(session.dataset),
        "expected_batch": session.sampler.expected_batch,
        "secure": mechanism.noise.secure and session.sampler.secure,
        "non_private": non_private(config),
        "audit": _audit_line(audited),
        "config": json.loads(config.to_json()),
    })  # fmt: skip
    certificate.save(document, folder)


def _audit_line(path: Path) -> str | None:
    """What an audit of this run found, in one line; a file that is no audit is no audit."""
    from erlangen.audit.runs import in_words

    try:
        return in_words(json.loads(path.read_text())) if path.exists() else None
    except (ValueError, KeyError, TypeError):
        return f"{path.name} cannot be read"


def is_evaluation(config: TrainConfig, done: int) -> bool:
    """``evaluations`` times, evenly, the last step included."""
    return done * config.evaluations // config.steps > (done - 1) * config.evaluations // config.steps


def non_private(config: TrainConfig) -> list[str]:
    """Statistics of private records that were computed outside a mechanism."""
    return ["train_loss"] if config.non_private else []


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask for a stop at the end of the step; a second one does not wait."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: somebody else handles signals
        before = {}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_folder(out: str | Path, overwrite: bool) -> Path:
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"{folder} holds a run already; choose another --out, pass --overwrite, or go on with --resume {folder}"
            )
        if not (folder / "config.json").exists():
            raise ConfigError(f"{folder} is not empty and holds no run: refusing to overwrite it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(path: Path, text: str) -> None:
    checkpoint.write_atomically(path, text.encode())


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
        "releases": session.accountant.steps,
    }
    return {
        "test": {k: v for k, v in metrics.items() if k not in ("step", "epsilon", "non_private")},
        "guarantee": guarantee,
        "steps": session.step_count,
        "planned_steps": config.steps,
        "data": {
            "name": session.dataset.name,
            "records": len(session.dataset),
            "classes": session.dataset.classes,
            "class_names": getattr(session.dataset, "class_names", None),
            "input_shape": list(session.dataset.input_shape),
            "fingerprint": session.dataset.fingerprint(),
        },
        "parameters": sum(p.numel() for p in session.model.parameters() if p.requires_grad),
        "randomness": mechanism.noise.description,
        "non_private": non_private(config),
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
