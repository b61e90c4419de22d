"""The run folder and what a run is told by: paths, names of random streams, remarks on the data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from erlangen.accounting.compose import LEDGER_NAME
from erlangen.accounting.ledger import Book, LedgerError, copy_path, is_live, read_ledger
from erlangen.atomic import write_atomically
from erlangen.data import Dataset, datasets
from erlangen.data.base import digest_of
from erlangen.models.public import digest, find
from erlangen.training.config import ConfigError, TrainConfig

#: options that change no weight: a run may be resumed with others, and equal seeds give equal weights whatever they are
NO_RESULT = ("data", "device", "max_physical_batch", "pad", "graph", "compile", "shard", "evaluations", "checkpoints",
             "average_views")  # fmt: skip


def absolute(place: str) -> str:
    """Where data or weights are, whatever folder a later command is called from; names of data sets stay names."""
    return place if place in datasets() or not Path(place).exists() else os.path.abspath(place)


def stream_id(config: TrainConfig, dataset: Dataset) -> str:
    """The name of a run's random streams: equal for the same options on the same records, different for any other run.

    So two seeded runs give the same weights exactly if they should, and never share noise if they differ.
    """
    options = {k: v for k, v in dataclasses.asdict(config.settled(dataset.unit_count)).items() if k not in (*NO_RESULT, "weights")}
    records = [dataset.fingerprint()]
    if dataset.unit is not None:  # who belongs together is data too
        records.append(digest_of(np.asarray(dataset.unit)))
    options |= begun_with(config)
    facts = json.dumps({**options, "records": "/".join(records)}, sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def options_of(config: TrainConfig) -> dict[str, Any]:
    """The options that decide what a run releases and shows, as its ledger keeps them from the beginning."""
    return {name: value for name, value in without_places(config).items() if name not in NO_RESULT}


def begun_with(config: TrainConfig) -> dict[str, str]:
    """What is in the file of public weights, whatever its name; empty without one."""
    return {} if config.weights is None else {"weights": digest(config.weights)}


def refuse_own_weights(config: TrainConfig, dataset: Dataset) -> None:
    """Weights that a run has learnt from these very records are not public: the certificate would leave out what that run spent."""
    found = run_of(config.weights)
    if found is None:
        return
    run, book = found
    if book.data == dataset.fingerprint():
        raise ConfigError(
            f"weights is {config.weights!r}, which the run {run.name!r} learnt from the records of {dataset.name}: they are not "
            f"public, and the ε of this run would leave out what that one spent. Train {run.name!r} for longer instead, or begin "
            "with weights that no record of this data had a part in"
        )


def run_of(weights: str | None) -> tuple[Path, Book] | None:
    """The run in whose folder the weights are, and its ledger; None where they are no run's, or it released nothing."""
    if weights is None:
        return None
    run = find(weights).resolve().parent
    ledger = run / LEDGER_NAME
    if not ledger.exists() and not copy_path(ledger).exists():
        return None
    try:
        book = read_ledger(ledger, single_copy=True)
    except LedgerError as error:
        raise ConfigError(f"weights is {weights!r}, of a run whose ledger cannot be read, so that whose records they were "
                          f"learnt from is not known: {error}") from error  # fmt: skip
    return (run, book) if book.steps else None


def remark_on(dataset: Dataset, unit: str | None, say: Callable[[str], None]) -> None:
    """What the owner of the data wants to know before training. Said, never stored: it speaks of private records."""
    for note in dataset.notes:
        say(note)
    if dataset.unit is not None:
        say(f"{dataset.unit_count} {unit or 'group'}(s) own the {len(dataset)} training records; each is protected as one")
    if dataset.y_test is None:
        return
    unseen = sorted(set(np.unique(dataset.y_test).tolist()) - set(np.unique(dataset.y_train).tolist()))
    if unseen:
        shown = ", ".join(map(str, unseen[:10])) + (" …" if len(unseen) > 10 else "")
        share = float(np.isin(dataset.y_test, unseen).mean())
        say(
            f"y_test holds classes that never occur in y_train ({shown}): {share:.1%} of the test set cannot be right; "
            "check the labels and the split"
        )


def how_to_finish(folder: Path) -> str:
    """The cure where something is missing that a run leaves at its end."""
    if (folder / "config.json").is_file():
        return f"the run did not finish; go on with: erlangen train --resume {quote(str(folder))}"
    return "name the folder of a finished run"


def require_free(out: str | Path, overwrite: bool) -> Path:
    """The place of a new run, not touched yet: nothing, an empty folder, or with ``overwrite`` a run that is not under way."""
    folder = Path(out)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        which = "which" if there == folder else f"but {there}"
        raise ConfigError(f"out is {folder}, {which} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"out is {folder}, but nothing may be written in {there.absolute()}; choose another --out")
    if folder.exists() and any(folder.iterdir()):
        if not any((folder / name).exists() for name in ("config.json", "ledger.jsonl", "ledger.jsonl.copy")):
            raise ConfigError(f"{folder} is not empty and holds no run: refusing to overwrite it; choose another --out")
        if not overwrite:
            raise ConfigError(
                f"{folder} holds a run already; choose another --out, pass --overwrite, or go on with "
                f"--resume {quote(str(folder))}"
            )
        if is_live(folder / "ledger.jsonl"):
            raise ConfigError(f"{folder} holds a run that is training at this moment; wait for it, end it, or choose another --out")
    return folder


def open_folder(out: str | Path, overwrite: bool) -> Path:
    """An empty folder for a run; one that holds something is refused, or with ``overwrite`` replaced if it is a run."""
    folder = require_free(out, overwrite)
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out is {folder}, which cannot be made: {error.strerror}; choose another --out") from error
    return folder


def without_places(config: TrainConfig) -> dict[str, Any]:
    """The options as certificates and reports show them: not where the owner keeps data and weights."""
    values: dict[str, Any] = json.loads(config.to_json())
    table = values["data_options"].get("unit_csv")
    if table is not None:
        values["data_options"]["unit_csv"] = Path(table).name
    return {**values, "data": Path(config.data).name, "weights": config.weights and Path(config.weights).name}


def write(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def append_line(path: Path, values: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(values) + "\n")
