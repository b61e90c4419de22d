"""Tuning on a split of the training set: every configuration once, the test set unread, and on where it stopped."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import erlangen.data.base
from erlangen.data.base import Dataset
from erlangen.experiments import preset
from erlangen.models import equivariant
from erlangen.models.equivariant import equivariant_resnet9
from tests.scripts import script

tune = script("tune")


@pytest.fixture
def cifar(monkeypatch) -> Dataset:
    """A stand-in whose test set cannot be scored: its labels are of no class."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (60, 3, 16, 16)).astype(np.float32), np.arange(60) % 10
    data = Dataset("cifar10", x, y, x[:5], np.full(5, 9), 10)
    monkeypatch.setitem(erlangen.data.base._DATASETS, "cifar10", lambda: data)
    return data


@pytest.fixture
def narrow(monkeypatch) -> None:
    """The recipe's network with half of the fields and less: norms of groups of fields still differ from those of fields."""
    fewer = lambda *args, **options: equivariant_resnet9(*args, **{**options, "field_counts": (7, 7, 14)})  # noqa: E731
    monkeypatch.setattr(equivariant, "equivariant_resnet9", fewer)


def start(monkeypatch, out, *words: str) -> dict:
    given = ["tune.py", "eq-tuned-trials", "--lr", "2", "3", "--clip", "2", "--holdout", "20", "--out", str(out)]
    monkeypatch.setattr(
        sys, "argv", [*given, "--steps", "1", "--batch", "1", "--physical", "4", "--device", "cpu", *words]
    )
    tune.main()
    return json.loads(out.read_text())


def test_the_held_out_part_is_of_the_training_set(cifar):
    part = tune.split(cifar, 20)
    assert (len(part), len(part.x_test)) == (40, 20)
    rows = np.concatenate([part.x_train, part.x_test])
    assert sorted(rows[:, 0, 0, 0]) == sorted(cifar.x_train[:, 0, 0, 0])


def test_the_grid_over_the_recipes_choices(tmp_path, monkeypatch, cifar, narrow):
    out = tmp_path / "t.json"
    partly = start(monkeypatch, out, "--only", "8 views")
    assert [(row["cell"], row["lr"]) for row in partly["trials"]] == [("8 views", rate) for rate in (2.0, 3.0)]
    whole = start(monkeypatch, out)
    assert whole["trials"][:2] == partly["trials"]  # made once
    cells = preset("eq-tuned-trials").cells
    assert len(whole["trials"]) == 2 * len(cells)
    names = {cell.name for cell in cells}
    for row in whole["trials"]:
        assert row["cell"] in names
        assert {"heldout_accuracy", "heldout_loss", "epsilon", "seconds"} <= set(row)
        assert not any(name.startswith("test_") for name in row)
    losses = {row["heldout_loss"] for row in whole["trials"]}
    assert len(losses) == 2 * (len(cells) - 1), "the first step of a falling rate is that of a constant one"
    with pytest.raises(SystemExit, match="holdout = 20, and now it is 10"):
        start(monkeypatch, out, "--holdout", "10")


def test_averages_over_other_parts_of_the_steps(tmp_path, monkeypatch, cifar):
    steps = ["--steps", "3", "--averages", "9", "0.01", "1000"]
    row = start(monkeypatch, tmp_path / "t.json", "--only", "as eq-tuned", *steps)["trials"][0]
    found = row["heldout_accuracy_by_average"]
    assert set(found) == {"9", "0.01", "1000"}
    assert found["9"] == row["heldout_accuracy"], "the average that every run has"


def test_no_trial_is_begun_out_of_time(tmp_path, monkeypatch, cifar, capsys):
    with pytest.raises(FileNotFoundError):
        start(monkeypatch, tmp_path / "t.json", "--budget", "0")  # nothing was trained, so nothing was written
    assert "run the same command again" in capsys.readouterr().out
