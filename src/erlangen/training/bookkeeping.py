"""The ledger of a run: how it begins, how it goes on, and how many steps it still allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from erlangen.accounting import Budget
from erlangen.accounting.ledger import Ledger, Release, copy_path
from erlangen.data import Dataset
from erlangen.sampling import Units
from erlangen.training.claims import STATED, not_covered
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import begun_with, options_of, stream_id
from erlangen.training.session import Session
from erlangen.training.summary import non_private


def new_ledger(folder: Path, session: Session) -> Ledger:
    return Ledger.create(
        folder / "ledger.jsonl",
        _header(session.run_id, session.units, session.config, session.dataset),
        data=session.dataset.fingerprint(),
        run=folder.name,
        unit=session.units.name,
        block=max(1, min(64, session.config.steps // 32)),  # a crash early in a short run must not spend all of it
    )


def old_ledger(folder: Path, config: TrainConfig, dataset: Dataset, single_copy: bool) -> Ledger:
    """The run's ledger; a new one if the run ended before anything of the private records left memory."""
    path = folder / "ledger.jsonl"
    if path.exists() or copy_path(path).exists():
        return Ledger.open(path, single_copy)
    left = [
        name for name in ("checkpoint.safetensors", "metrics.jsonl", "weights.safetensors") if (folder / name).exists()
    ]
    if left:
        raise ConfigError(
            f"the ledger of {folder} is gone, but {left[0]} is there: what it cost cannot be known. Restore ledger.jsonl, or "
            "treat the run as not private (ε = ∞)"
        )
    header = _header(stream_id(config, dataset), Units(len(dataset), dataset.unit, config.unit or "record"), config, dataset)
    return Ledger.create(path, header, data=dataset.fingerprint(), run=folder.name, unit=config.unit or "record")


def _header(streams: str, units: Units, config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """What a run begins with and must go on with."""
    kept = {"streams": streams, "units": units.digest(), "options": options_of(config), "non_private": non_private(config)}
    said = {"stated": STATED, "not_covered": not_covered(config, units, dataset)}
    return {**kept, **said, **begun_with(config)}


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


def write_ahead(session: Session, ledger: Ledger, last: int) -> None:
    """From now on no noisy gradient is used before its release is on disk."""
    mechanism = session.training.mechanism
    release = Release(
        session.training.event(),
        sensitivity=mechanism.sensitivity,
        sigma_eff=getattr(mechanism.event(), "noise_multiplier", None),
        sample_rate=session.sampler.sample_rate,
        unit=session.units.name,
        mechanism=mechanism.name,
        reason=mechanism.unsound
        or session.sampler.unsound
        or ("no noise is added (σ = 0)" if mechanism.noise_multiplier == 0 else None),
    )
    ledger.limit = last - session.step_count
    session.training.before_release.append(
        lambda event: ledger.spend(release if event == release.event else replace(release, event=event, sigma_eff=None))
    )
