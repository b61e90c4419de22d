"""A run that goes on: what must be as it was when it began, and the state that its checkpoint kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from erlangen.accounting import certificate, verify
from erlangen.accounting.ledger import Ledger
from erlangen.data import Dataset
from erlangen.sampling import Units
from erlangen.training import checkpoint
from erlangen.training.bookkeeping import allowed_steps
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import absolute, begun_with, options_of
from erlangen.training.session import Session


def resumed_config(folder: Path, changes: dict[str, Any]) -> TrainConfig:
    """The configuration in a run's folder, with the changes that change no result."""
    if not (folder / "config.json").is_file():
        begun = (folder / "ledger.jsonl").exists()
        again = f"it ended before training began: start it again with --out {folder} --overwrite"
        cure = again if begun else "name the folder of a run"
        raise ConfigError(f"{folder} holds no run to resume: there is no config.json; {cure}")
    config = TrainConfig.from_file(folder / "config.json")
    changes = _those_that_may_change(changes, config, folder)
    if "data" in changes:
        changes["data"] = absolute(changes["data"])
    if "data" not in changes and Path(config.data).is_absolute() and not Path(config.data).exists():
        raise ConfigError(f"the data of {folder} is gone from {config.data}; if it was moved, say where: --data FILE")
    return replace(config, **changes)


def _those_that_may_change(changes: dict[str, Any], config: TrainConfig, folder: Path) -> dict[str, Any]:
    """What a run may go on with. Options that are said again as they were, as whoever repeats a command does, change nothing."""
    may = {"data", "device", "max_physical_batch", "shard"}
    fixed = {name: value for name, value in sorted(changes.items()) if name not in may}
    if fixed.get("weights"):
        fixed["weights"] = absolute(fixed["weights"])
    unknown = [name for name in fixed if not hasattr(config, name)]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no option of a run; leave it out when resuming {folder}")
    other = [
        f"{name} ({getattr(config, name)!r} in this run, {value!r} now)"
        for name, value in fixed.items()
        if value != getattr(config, name)
    ]
    if other:
        raise ConfigError(
            f"a resumed run keeps its options, and these differ: {', '.join(other)}. Give --resume {folder} alone, or start "
            "a new run"
        )
    return {name: value for name, value in changes.items() if name in may}


def require_same(folder: Path, ledger: Ledger, config: TrainConfig, dataset: Dataset) -> None:
    """The records, who belongs together, the options and the weights are those that the run began with."""
    if ledger.book.data != dataset.fingerprint():
        raise ConfigError(f"the data is not what {folder} was trained on: its fingerprint differs; give its records (--data)")
    began = ledger.book.header
    if began.get("units") not in (None, Units(len(dataset), dataset.unit).digest()):  # data too, and no part of the fingerprint
        raise ConfigError(
            f"the records of {folder} were grouped otherwise when it began: whose record moved from one unit to another would "
            "count in both. Restore the units, or start a new run"
        )
    _require_same_options(folder / "config.json", began.get("options"), config)
    if began.get("weights") != begun_with(config).get("weights"):
        raise ConfigError(f"{folder} began with other weights than {config.weights} holds; restore the file, or start a new run")


def _require_same_options(config_file: Path, began: Any, config: TrainConfig) -> None:
    """Its certificate speaks of the whole run (who could draw its noise again, what it showed without noise, δ), and releases
    before training are made once."""
    now = options_of(config)
    for name, value in began.items() if isinstance(began, dict) else ():
        if now.get(name) != value:
            raise ConfigError(
                f"{config_file} was changed after the run began: {name} is {now.get(name)!r}, and was {value!r}. Restore it, or "
                "start a new run"
            )


def load_checkpoint(session: Session, folder: Path, ledger: Ledger, say: Callable[[str], None]) -> None:
    """The session as its last checkpoint left it; what was spent since stays spent."""
    saved = folder / "checkpoint.safetensors"
    if not saved.exists():
        spent = f"; the {ledger.steps} releases that the ledger counts stay spent" if ledger.steps else ""
        say(f"{folder} has no checkpoint: training starts again from step 0{spent}")
        return
    state = checkpoint.load(saved)
    head = state.get("ledger")
    if not isinstance(head, dict) or not ledger.contains(head):
        raise ConfigError(f"{saved} does not belong to the ledger beside it: one of them was replaced or rolled back. "
                          "Restore it, or treat the run as not private (ε = ∞)")  # fmt: skip
    try:
        session.load_state_dict(state)
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise checkpoint.CheckpointError(
            f"{saved} does not fit this run: {str(error)[:200] or type(error).__name__}"
        ) from error
    lost = sum(count for event, count in ledger.pairs() if event == session.training.event()) - session.step_count
    if lost > 0:
        say(
            f"{folder} goes on from step {session.step_count}: {lost} steps more were made or reserved by a process that "
            "was killed; they stay spent, and fewer may fit into the budget"
        )
    if session.step_count:
        _require_same_releases(session, folder, ledger)


def _require_same_releases(session: Session, folder: Path, ledger: Ledger) -> None:
    """A run goes on with releases of the kind that it has made, or ``config.json`` is not the one it began with."""
    made, following = [event for event, _ in ledger.pairs()], session.training.event()
    if made and following not in made:
        raise ConfigError(
            f"{folder / 'config.json'} was changed after the run began: the next release would be {following}, and the ledger has "
            f"{made[-1]}. Restore its options (mechanism, as_published, clipping, …), or start a new run"
        )


def finished(session: Session, folder: Path, ledger: Ledger) -> dict[str, Any] | None:
    """The summary of a run with nothing left to do, if it promises what the certificate promises, which holds and counts what the
    ledger counts: where it does not, both are written again."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        certified = certificate.load(folder / "certificate.json")
        if summary["steps"] != session.step_count or certified["steps"] != ledger.book.steps:
            return None
        if not _promises_the_same(summary["guarantee"], certified) or verify(folder / "certificate.json", page=False):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (folder / "weights.safetensors").is_file() or allowed_steps(session, ledger) > 0:
        return None
    return {**summary, "complete": True}


def _promises_the_same(told: dict[str, Any], certified: dict[str, Any]) -> bool:
    spent = certified["guarantee"]["epsilon"].items()
    near = (value is None or math.isclose(float(told["epsilon"][method]), float(value), rel_tol=1e-3) for method, value in spent)
    return (told["delta"], told["unit"]) == (certified["delta"], certified["unit"]) and all(near)


def why_complete(summary: dict[str, Any]) -> str:
    steps, planned = summary["steps"], summary["planned_steps"]
    if steps >= planned:
        return f"all {planned} steps are done"
    return f"{steps} of {planned} steps are done and the privacy budget is spent"
