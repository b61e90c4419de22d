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

from erlangen.accounting import epsilon
from erlangen.accounting.ledger import Ledger, LedgerError, read_ledger
from erlangen.accounting.words import in_json, upper
from erlangen.atomic import write_atomically
from erlangen.data import DataOptions, Dataset
from erlangen.data.base import renormalised
from erlangen.deploy.card import ModelCard
from erlangen.prior.kept import MADE_UP, Learn, kept_prior, quietly
from erlangen.training import checkpoint
from erlangen.training.bookkeeping import allowed_steps, new_ledger, old_ledger, write_ahead
from erlangen.training.built import load_data, require_known
from erlangen.training.claims import remark_on_guarantee, spent_by, write_certificate
from erlangen.training.config import TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.distributed import agree, anyone_asks, begin, meet
from erlangen.training.folder import absolute, append_line, open_folder, remark_on, require_free, stream_id, write
from erlangen.training.metrics import near_zero
from erlangen.training.moments import is_checkpoint, is_evaluation, stop_requests
from erlangen.training.resumed import finished, load_checkpoint, require_same, resumed_config, why_complete
from erlangen.training.session import Session
from erlangen.training.summary import summarise
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
    learn: Learn = quietly,
) -> Result:
    """Train privately. With ``out`` everything is written there; the summary says what was guaranteed.

    Where ``config.weights`` is "made-up", ``learn`` first teaches the network what made-up images can, unless that is kept from
    another run. ``dataset`` stands in for ``config.data`` (from `erlangen.data.from_torch`, say); to resume, hand it over again.
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
    if config.weights == MADE_UP:
        config = replace(config, weights=str(_prior_for(config, dataset, workers, learn)))
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
    with new_ledger(folder, session) as ledger:
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
    config = resumed_config(folder, changes)
    pick_device(config.device, workers)
    dataset = load_data(config) if dataset is None else _handed_over(dataset, config)
    remark_on(dataset, config.unit, say)
    _remark_on_shards(config, workers, say)
    with old_ledger(folder, config, dataset, single_copy) as ledger:
        require_same(folder, ledger, config, dataset)
        for note in ledger.damage:
            say(f"the ledger of {folder} was damaged and has been repaired: {note}")
        if "data" in changes:
            stored = TrainConfig.from_file(folder / "config.json")
            write(folder / "config.json", replace(stored, data=config.data).to_json() + "\n")
        session = Session(config, dataset, str(ledger.book.header.get("streams", folder.name)), workers)
        load_checkpoint(session, folder, ledger, say)
        for event, count in ledger.pairs():
            session.accountant.record(event, count)
        summary = finished(session, folder, ledger)
        if summary is not None:
            say(f"{folder} is complete: {why_complete(summary)}; nothing was trained")
            begin(session, session.step_count)
            meet(session, for_good=True)
            return Result(summary, session, folder)
        return _run(session, folder, ledger, watch)


def _prior_for(config: TrainConfig, dataset: Dataset, workers: Workers | None, learn: Learn) -> Path:
    """Of the records it asks for nothing but the shape of an image, which shows in the weights of any network."""
    settled = config.settled(dataset.unit_count)
    return kept_prior(
        settled.model, settled.model_options, dataset.input_shape, pick_device(config.device, workers), learn
    )


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


def _run(session: Session, folder: Path | None, ledger: Ledger | None, watch: Watcher | None) -> Result:
    started = time.perf_counter()
    metrics: dict[str, Any] = {}
    last = begin(session, session.step_count + allowed_steps(session, ledger))
    if ledger is not None:
        write_ahead(session, ledger, last)
    with stop_requests() as asked:
        try:
            while session.step_count < last:
                session.step()
                agree(session, last)
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
    metrics: dict[str, Any] = {"step": session.step_count, "epsilon": in_json(session.epsilon()), **session.evaluate()}
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


def _leave(session: Session, folder: Path, ledger: Ledger, summary: dict[str, Any]) -> None:
    ledger.require_in_place()
    weights = to_bytes({k: t.detach().cpu().contiguous() for k, t in session.weights().items()})
    write_atomically(folder / "weights.safetensors", weights)
    public = session.public_predictions()
    if public is not None:
        public.save(folder)
    write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_certificate(session, folder, ledger, hashlib.sha256(weights).hexdigest())
