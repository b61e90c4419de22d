"""Accuracy and confusion matrix of a run on *private* validation data, released with accounted noise.

Two releases of counts, each of sensitivity 1 under add/remove of a record: the right answers, and the confusion matrix (of
which the accuracy would follow for free, but with the noise of every cell). Both are on the validation data's own ledger
before their values are returned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from erlangen.accounting import epsilon, metrics
from erlangen.accounting.compose import with_one_each, with_training
from erlangen.accounting.ledger import Ledger, Release, copy_path, read_ledger
from erlangen.accounting.ledger_format import Book
from erlangen.accounting.words import in_json
from erlangen.data import Dataset, load
from erlangen.deploy.averaged import answering, rows_at_once
from erlangen.deploy.card import ModelCard, load_model
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import how_to_finish


def validate(
    folder: str | Path,
    source: str | Path,
    noise_multiplier: float,
    delta: float | None = None,
    single_copy: bool = False,
    skip_bad: bool = False,
    per_record: bool = False,
) -> dict[str, Any]:
    """Release how well a run does on the private records ``x_train``, ``y_train`` of ``source``.

    Every call is another release on these records; ε in the result is that of all that this run's folder counts, *per record*
    (other runs that were tried on the same records add up with it: `erlangen account RUN1 RUN2`). After a
    run whose unit of privacy is another one that must be asked for, by ``per_record``: ``epsilon_if_one_each`` is then that of
    training and validation together for each unit (patient) to whom no more than one of the records belongs. Whether some of the
    records were trained on cannot be seen unless all were: ``epsilon_if_trained_on`` is theirs.
    """
    folder = Path(folder)
    if noise_multiplier < 0:
        raise ConfigError(f"noise_multiplier is {noise_multiplier}; give σ ≥ 0")
    if delta is not None and not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; give 0 < δ < 1")
    summary = folder / "summary.json"
    if not summary.is_file():
        raise ConfigError(f"{folder} holds no finished run: there is no summary.json; {how_to_finish(folder)}")
    config = TrainConfig.from_file(folder / "config.json")
    unit = config.unit
    if unit is not None and not per_record:
        raise ConfigError(
            f"the run protects each {unit}, but validation counts records: a {unit} with k of them would move the counts by k. "
            f"Give one record of each {unit} and pass per_record=True (--per-record)"
        )
    data, classes = _records(folder, source, skip_bad), int(json.loads(summary.read_text())["data"]["classes"])
    if data.classes > classes:
        raise ConfigError(f"{source} has labels up to {data.classes - 1}, but the model knows {classes} classes")
    delta = delta if delta is not None else min(1e-5, 0.1 / len(data))
    model = answering(load_model(folder, data.input_shape, classes), config.average_views, config.augment)
    predicted = predict(model, data)
    right = metrics.accuracy(predicted, data.y_train, noise_multiplier)
    table = metrics.confusion_matrix(predicted, data.y_train, classes, noise_multiplier)
    with open_ledger(folder / "validation-ledger.jsonl", data, single_copy) as ledger:
        for name, metric in (("accuracy", right), ("confusion-matrix", table)):
            ledger.spend(Release(metric.event, sensitivity=1.0, sigma_eff=noise_multiplier, mechanism=name))
    book, training = ledger.book, _training_ledger(folder)  # closed: what was reserved and not used is given back
    both, why = with_training(training, book, delta)
    trained_on = training is not None and training.data == data.fingerprint()
    one_each = with_one_each(training, book, delta)
    spent = both if trained_on else epsilon(book.pairs(), delta)
    return {
        "accuracy": right.value,
        "accuracy_std": right.std,
        "confusion": table.value.tolist(),
        "noise_std": table.std,
        "records": len(data),
        "trained_on": trained_on,
        "unit": "record",
        "epsilon": in_json(spent),
        "epsilon_if_trained_on": in_json(both),
        "why_if_trained_on": why,
        "training_protects": unit or "record",
        "epsilon_if_one_each": None if one_each is None else in_json(one_each[1]),
        "delta": delta,
        "releases": book.steps,
        "ledger_notes": list(book.notes),
    }


def _training_ledger(folder: Path) -> Book | None:
    path = folder / "ledger.jsonl"
    return read_ledger(path) if path.exists() or copy_path(path).exists() else None


def _records(folder: Path, source: str | Path, skip_bad: bool) -> Dataset:
    """The validation records, read as the run's own were."""
    return ModelCard.read(folder).load(source, skip_bad) if (folder / "model.json").is_file() else load(source)


@torch.no_grad()
def predict(model: nn.Module, data: Dataset) -> np.ndarray:
    parts = torch.from_numpy(data.x_train).split(rows_at_once(model, 1024))
    return torch.cat([model(part).argmax(1) for part in parts]).numpy()


def open_ledger(path: Path, data: Dataset, single_copy: bool = False) -> Ledger:
    """The ledger of these validation records; other records need another run folder or their own account."""
    if not path.exists() and not copy_path(path).exists():
        return Ledger.create(path, data=data.fingerprint(), block=1)
    ledger = Ledger.open(path, single_copy)
    if ledger.book.data != data.fingerprint():
        ledger.close()
        raise ConfigError(
            f"{path} counts releases on other records: use the same validation data, or keep that ledger (what it counts stays "
            "spent) and validate on these from a copy of the run's folder without it"
        )
    return ledger
