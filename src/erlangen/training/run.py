"""A run and its folder: configuration, ledger, metrics, checkpoint, weights, summary, certificate.

config.json           every option, settled
model.json            what prediction needs: input, classes, how pixels are scaled
ledger.jsonl (+.copy) what has been released, written before it is used
metrics.jsonl         public test metrics and ε, line by line
checkpoint.safetensors  everything a resumed run needs; never a seed
weights.safetensors   the released weights
public.safetensors    predictions on the public test set, and a few of its images
summary.json, certificate.json, certificate.md
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from safetensors.torch import save as to_bytes

from erlangen.accounting import Budget, certificate, epsilon
from erlangen.accounting.ledger import Ledger, LedgerError, Release, copy_path, read_ledger
from erlangen.accounting.words import upper
from erlangen.data import DataOptions, Dataset
from erlangen.data.base import renormalised
from erlangen.deploy.card import ModelCard
from erlangen.sampling import Units
from erlangen.training import checkpoint
from erlangen.training.claims import STATED, remark_on_guarantee, spent_by, write_certificate
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.distributed import anyone_asks, begin, meet
from erlangen.training.folder import (
    absolute,
    append_line,
    begun_with,
    open_folder,
    options_of,
    remark_on,
    require_free,
    require_its_options,
    require_its_releases,
    stream_id,
    write,
)
from erlangen.training.metrics import near_zero
from erlangen.training.moments import is_checkpoint, is_evaluation, stop_requests
from erlangen.training.session import Session, load_data, require_known
from erlangen.training.summary import non_private, number, summarise
from erlangen.workers import Workers

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


def warn(text: str) -> None:
    """Where remarks go unless the caller takes them (the command line prints them)."""
    warnings.warn(text, stacklevel=3)


def train(
    config: TrainConfig,
    out: str | Path | None = None,
    overwrite: bool = False,
    watch: Watcher | None = None,
    say: Callable[[str], None] = warn,
    workers: Workers | None = None,
    dataset: Dataset | None = None,
) -> Result:
    """Train privately. With ``out`` everything is written there; the summary says what was guaranteed.

    ``dataset`` stands in for ``config.data`` (from `erlangen.data.from_torch`, say); to resume, hand it over again.
    ``workers`` is for `distributed.train`, which lets several processes share the work of this one.
    """
    if out is not None:  # this and unknown names before the records are read, which can take minutes
        require_free(out, overwrite)
    require_known(config)
    pick_device(config.device, workers)
    config = replace(
        config, data=absolute(config.data) if dataset is None else dataset.name, weights=config.weights and absolute(config.weights)
    )
    dataset = load_data(config) if dataset is None else _handed_over(dataset, config)
    remark_on(dataset, config.unit, say)
    _remark_on_shards(config, workers, say)
    if out is None:
        return _run(Session(config, dataset, workers=workers), None, None, watch)
    session = Session(config, dataset, run_id=stream_id(config, dataset), workers=workers)
    replaced = spent_by(Path(out))
    folder = open_folder(out, overwrite)  # only now: options that do not fit together must not cost the old run
    if replaced is not None:
        say(f"the run in {folder} is replaced with its ledger: the ε = {replaced} that it spent still counts for who saw its model")
    remark_on_guarantee(session, say)
    with _new_ledger(folder, session) as ledger:
        for release in session.prior:  # on disk before its value is
            ledger.reserve(release, 1)
            ledger.spend(release)
        write(folder / "config.json", session.config.to_json() + "\n")
        ModelCard.of(session).save(folder)
        return _run(session, folder, ledger, watch)


def resume(
    folder: str | Path,
    watch: Watcher | None = None,
    say: Callable[[str], None] = warn,
    single_copy: bool = False,
    workers: Workers | None = None,
    dataset: Dataset | None = None,
    **changes: Any,
) -> Result:
    """Go on where a run stopped, also on another device, with another physical batch size, or with moved data.

    What changes no result may change: ``device``, ``max_physical_batch``, ``shard``, and ``data`` if it holds the same records.
    Damage to the ledger is repaired and said; every release it counts stays spent, whatever checkpoint is resumed.
    """
    folder = Path(folder)
    config = _resumed_config(folder, changes)
    pick_device(config.device, workers)
    dataset = load_data(config) if dataset is None else _handed_over(dataset, config)
    remark_on(dataset, config.unit, say)
    _remark_on_shards(config, workers, say)
    with _old_ledger(folder, config, dataset, single_copy) as ledger:
        if ledger.book.data != dataset.fingerprint():
            raise ConfigError(f"the data is not what {folder} was trained on: its fingerprint differs; give its records (--data)")
        _require_same_units(folder, ledger, dataset)
        require_its_options(folder / "config.json", ledger.book.header.get("options"), config)
        _require_same_weights(folder, ledger, config)
        for note in ledger.damage:
            say(f"the ledger of {folder} was damaged and has been repaired: {note}")
        if "data" in changes:
            stored = TrainConfig.from_file(folder / "config.json")
            write(folder / "config.json", replace(stored, data=config.data).to_json() + "\n")
        session = Session(config, dataset, str(ledger.book.header.get("streams", folder.name)), workers)
        _load_checkpoint(session, folder, ledger, say)
        if session.step_count:
            made = [event for event, _ in ledger.pairs()]
            require_its_releases(folder / "config.json", session.training.event(), made)
        for event, count in ledger.pairs():
            session.accountant.record(event, count)
        finished = _finished(session, folder, ledger)
        if finished is not None:
            say(f"{folder} is complete: {_why_complete(finished)}; nothing was trained")
            begin(session, session.step_count)
            meet(session, for_good=True)
            return Result(finished, session, folder)
        return _run(session, folder, ledger, watch)


def _remark_on_shards(config: TrainConfig, workers: Workers | None, say: Callable[[str], None]) -> None:
    if config.shard and (workers is None or workers.alone):
        say(
            "shard does nothing here: there is one process, and it holds the whole network; start several with torchrun "
            "--nproc-per-node N -m erlangen train …"
        )


def _handed_over(dataset: Dataset, config: TrainConfig) -> Dataset:
    """The caller's records under the constants of the configuration, as a file of them would be read."""
    options = DataOptions.of(config.data_options)
    options.refuse_for_named(dataset.name)
    constants = options.constants()
    return dataset if constants is None else renormalised(dataset, *constants)


def _resumed_config(folder: Path, changes: dict[str, Any]) -> TrainConfig:
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


def _header(streams: str, units: Units, config: TrainConfig) -> dict[str, Any]:
    """What a run begins with and must go on with."""
    kept = {"streams": streams, "units": units.digest(), "options": options_of(config), "non_private": non_private(config)}
    return {**kept, "stated": STATED, **begun_with(config)}


def _new_ledger(folder: Path, session: Session) -> Ledger:
    return Ledger.create(
        folder / "ledger.jsonl",
        _header(session.run_id, session.units, session.config),
        data=session.dataset.fingerprint(),
        run=folder.name,
        unit=session.units.name,
        block=max(1, min(64, session.config.steps // 32)),  # a crash early in a short run must not spend all of it
    )


def _old_ledger(folder: Path, config: TrainConfig, dataset: Dataset, single_copy: bool) -> Ledger:
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
    header = _header(stream_id(config, dataset), Units(len(dataset), dataset.unit), config)
    return Ledger.create(path, header, data=dataset.fingerprint(), run=folder.name, unit=config.unit or "record")


def _require_same_units(folder: Path, ledger: Ledger, dataset: Dataset) -> None:
    """Who belongs together is data too, and no part of the fingerprint."""
    before = ledger.book.header.get("units")
    if before not in (None, Units(len(dataset), dataset.unit).digest()):
        raise ConfigError(
            f"the records of {folder} were grouped otherwise when it began: whose record moved from one unit to another would "
            "count in both. Restore the units, or start a new run"
        )


def _require_same_weights(folder: Path, ledger: Ledger, config: TrainConfig) -> None:
    if ledger.book.header.get("weights") != begun_with(config).get("weights"):
        raise ConfigError(f"{folder} began with other weights than {config.weights} holds; restore the file, or start a new run")


def _load_checkpoint(session: Session, folder: Path, ledger: Ledger, say: Callable[[str], None]) -> None:
    saved = folder / "checkpoint.safetensors"
    if not saved.exists():
        spent = f"; the {ledger.steps} releases that the ledger counts stay spent" if ledger.steps else ""
        say(f"{folder} has no checkpoint: training starts again from step 0{spent}")
        return
    state = checkpoint.load(saved)
    head = state.get("ledger")
    if not isinstance(head, dict) or not ledger.contains(head):
        raise ConfigError(f"{saved} does not belong to the ledger beside it: one of them was replaced or rolled back")
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


def _finished(session: Session, folder: Path, ledger: Ledger) -> dict[str, Any] | None:
    """The summary of a run with nothing left to do, whose certificate counts what its ledger counts."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        certified = certificate.load(folder / "certificate.json")["steps"]
        if summary["steps"] != session.step_count or certified != ledger.book.steps:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (folder / "weights.safetensors").is_file() or allowed_steps(session, ledger) > 0:
        return None
    return {**summary, "complete": True}


def _why_complete(summary: dict[str, Any]) -> str:
    steps, planned = summary["steps"], summary["planned_steps"]
    if steps >= planned:
        return f"all {planned} steps are done"
    return f"{steps} of {planned} steps are done and the privacy budget is spent"


def _run(session: Session, folder: Path | None, ledger: Ledger | None, watch: Watcher | None) -> Result:
    started = time.perf_counter()
    metrics: dict[str, Any] = {}
    last = begin(session, session.step_count + allowed_steps(session, ledger))
    if ledger is not None:
        _write_ahead(session, ledger, last)
    with stop_requests() as asked:
        try:
            while session.step_count < last:
                session.step()
                if is_evaluation(session.config, session.step_count) or session.step_count == last:
                    metrics = _record(session, folder, ledger)
                elif is_checkpoint(session.config, session.step_count):
                    _keep(session, folder, ledger)
                if watch is not None:
                    watch(session, metrics)
                if anyone_asks(session, asked) and session.step_count < last:
                    _record(session, folder, ledger)
                    meet(session, for_good=True)
                    raise Interrupted(_stopped(session, folder, ledger, f"after step {session.step_count}"))
        except KeyboardInterrupt:
            where = f"in the middle of step {session.step_count + 1}"
            raise Interrupted(_stopped(session, folder, ledger, where)) from None
    metrics = metrics or _record(session, folder, ledger)
    if ledger is not None:
        ledger.settle()
    summary = summarise(session, metrics, time.perf_counter() - started)
    if folder is not None and ledger is not None:
        summary["ledger_notes"] = list(ledger.book.notes)
        _leave(session, folder, ledger, summary)
    meet(session, for_good=True)
    return Result(summary, session, folder)


def _stopped(session: Session, folder: Path | None, ledger: Ledger | None, where: str) -> str:
    """What a stop leaves: everything that was used is spent, the rest of the reservation is given back."""
    config = session.config
    text = f"stopped {where} of {config.steps}"
    if folder is None or ledger is None:
        return text
    with suppress(LedgerError):  # a write was cut off: the reservation counts in full
        ledger.settle()
    assert config.delta is not None
    spent = epsilon(read_ledger(ledger.path).pairs(), config.delta)
    amount = f"ε = {upper(spent, 4)}" if math.isfinite(spent) else "ε = ∞"
    return f"{text}: {amount} at δ = {config.delta:.1e} is spent; go on with: erlangen train --resume {quote(str(folder))}"


def _record(session: Session, folder: Path | None, ledger: Ledger | None) -> dict[str, Any]:
    """Metrics of this moment, and a checkpoint of it."""
    if ledger is not None:
        ledger.require_in_place()  # or the folder is another run's by now
    metrics: dict[str, Any] = {"step": session.step_count, "epsilon": number(session.epsilon()), **session.evaluate()}
    metrics["small_parameters"] = near_zero(w for w in session.weights().values() if w.is_floating_point())
    if session.config.non_private:
        metrics["non_private"] = dict(session.non_private)
    if folder is not None and ledger is not None:
        append_line(folder / "metrics.jsonl", metrics)
    _keep(session, folder, ledger)
    return metrics


def _keep(session: Session, folder: Path | None, ledger: Ledger | None) -> None:
    """A checkpoint of this moment."""
    if folder is not None and ledger is not None:
        ledger.require_in_place()
        checkpoint.save(folder / "checkpoint.safetensors", {**session.state_dict(), "ledger": ledger.head})


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


def _leave(session: Session, folder: Path, ledger: Ledger, summary: dict[str, Any]) -> None:
    ledger.require_in_place()
    weights = to_bytes({k: t.detach().cpu().contiguous() for k, t in session.weights().items()})
    checkpoint.write_atomically(folder / "weights.safetensors", weights)
    public = session.public_predictions()
    if public is not None:
        public.save(folder)
    write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_certificate(session, folder, ledger, hashlib.sha256(weights).hexdigest())
