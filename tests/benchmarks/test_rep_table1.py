"""REP's Table 1: tuned alike, paired by seed, stopped in the middle of an ensemble and continued exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from erlangen.data.base import Dataset
from tests.scripts import script

bench = script("rep_table1")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A small table from its command line, with changes."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (72, 1, 12, 12)).astype(np.float32), np.arange(72) % 4
    monkeypatch.setattr(bench, "load", lambda name: Dataset(name, x, y, x[:12], y[:12], 4))

    def make(**changes) -> bench.Table1:
        options = {
            "data": tmp_path, "out": tmp_path / "table.json", "sigmas": "1.0,0.8", "many": "1.0", "many-seeds": 2, "seeds": 1,
            "steps": 3, "batch": 8, "lr": "0.1,0.5", "clip": "0.3", "fields": "1,1", "members": 3, "tune-steps": 2,
            "device": "cpu", **changes,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["rep_table1.py", *words, "--tune", "--resume"])
        return bench.Table1(bench.arguments())

    return make


def content(path: Path) -> dict:
    return json.loads((path / "table.json").read_text())


def test_every_mechanism_is_tuned_alike_and_measured_at_what_was_best(start, tmp_path, capsys):
    start().main()
    found = content(tmp_path)
    tried = {(r["mechanism"], r["lr"], r["clip"], r["sigma"], r["steps"]) for r in found["tuning"]}
    assert tried == {(m, lr, 0.3, 1.0, 2) for m in bench.ORDER for lr in (0.1, 0.5)}
    for m in bench.ORDER:
        best = max((r for r in found["tuning"] if r["mechanism"] == m), key=lambda r: r["test_accuracy"])
        assert {r["lr"] for r in found["runs"] if r["mechanism"] == m} == {best["lr"]}
    cells = [(r["sigma"], r["seed"], r["mechanism"]) for r in found["runs"]]
    assert sorted(cells) == sorted((s, k, m) for s, k in ((1.0, 0), (1.0, 1), (0.8, 0)) for m in bench.ORDER)
    assert all({"brier", "ece", "small_parameters"} <= r.keys() and 0 <= r["small_parameters"] < 1 for r in found["runs"])
    assert found["table"] == bench.table(found["runs"], bench.PAPER)
    assert found["tuning"][0]["epsilon"]["pld"] < found["runs"][0]["epsilon"]["pld"], "fewer steps cost less"
    before = (tmp_path / "table.json").read_text()
    capsys.readouterr()
    start().main()
    assert "runs in" not in capsys.readouterr().out, "nothing is trained twice"
    assert content(tmp_path)["runs"] == json.loads(before)["runs"]


def test_an_ensemble_that_was_stopped_continues_exactly(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "CHUNK", 3)
    start(out=tmp_path / "whole.json", steps=5).main()
    stopped = start(steps=5)
    left = iter([1e9] * 6)  # two ensembles of trials, then the first three steps of runs
    monkeypatch.setattr(stopped.budget, "left", lambda: next(left, 0.0))
    stopped.main()
    assert "out of time" in capsys.readouterr().out
    assert stopped.paused.exists()
    assert len(content(tmp_path)["tuning"]) == 6
    assert content(tmp_path)["runs"] == []
    going_on = start(steps=5)
    going_on.main()
    said = capsys.readouterr().out
    assert (said.count("step 3,"), said.count("step 5,")) == (2, 3), (
        "the first of three ensembles has its steps already"
    )
    assert not going_on.paused.exists()
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert content(tmp_path)["tuning"] == whole["tuning"]
    assert content(tmp_path)["runs"] == whole["runs"]


def test_other_options_are_not_mixed_with_what_is_there(start, tmp_path):
    start().main()
    before = (tmp_path / "table.json").read_bytes()
    with pytest.raises(SystemExit, match=r'\["iso", 0.1, 0.3, 1000\] in tuning with steps = 2, and now it is 1'):
        start(**{"tune-steps": 1}).main()
    with pytest.raises(SystemExit, match=r'\[1.0, "iso", 0\] in runs with steps = 3, and now it is 4'):
        start(steps=4).main()
    with pytest.raises(SystemExit, match=r"rows with batch = '8.0', and now it is '9.0'"):
        start(batch=9)
    assert (tmp_path / "table.json").read_bytes() == before
    without = json.loads(before)
    del without["conditions"]  # as files were: the settings say it
    (tmp_path / "table.json").write_text(json.dumps(without))
    with pytest.raises(SystemExit, match=r"rows with momentum = '0.0', and now it is '0.5'"):
        start(momentum=0.5)
    start().main()


def test_differences_are_paired_by_seed():
    accuracy = {("rep", 0): 0.5, ("rep", 1): 0.7, ("iso", 1): 0.6, ("iso", 0): 0.4, ("iso", 2): 0.0}
    runs = [
        {"mechanism": m, "sigma": 1.0, "seed": s, "epsilon": None, "test_accuracy": a} for (m, s), a in accuracy.items()
    ]
    runs[0]["test_accuracy"] = 0.48  # differences of 8 and 10: Student's quantile with one degree of freedom is 12.706
    (row,) = bench.table(runs, {})
    assert row["rep-iso"] == {"mean": pytest.approx(9), "half_width_95": pytest.approx(12.706, rel=1e-3), "pairs": 2}
    assert row["cells"]["iso"]["paper"] is None
    assert row["cells"]["iso"]["seeds"] == 3


def test_metrics_and_powers_stand_beside_each_other(start, tmp_path, capsys):
    named = "iso,rep,rep:paper,rep:escnn:0.5"
    table = start(mechanisms=named, sigmas="1.0", members=4)
    asked = [table.config(bench.Cell(m, 1.0, 0, 0.1, 0.3, 2)) for m in named.split(",")]
    assert [(c.mechanism, c.mechanism_options) for c in asked] == [
        ("iso", {}), ("rep", {"metric": "escnn", "power": 1.0}), ("rep", {"metric": "paper", "power": 1.0}),
        ("rep", {"metric": "escnn", "power": 0.5}),
    ]  # fmt: skip
    table.main()
    (row,) = content(tmp_path)["table"]
    assert list(row["cells"]) == named.split(",")
    assert {"rep-iso", "rep:paper-iso", "rep:escnn:0.5-iso"} <= set(row)
    assert "rep-shuffle" not in row
    assert row["cells"]["rep"]["paper"] == 72.1
    assert row["cells"]["rep:paper"]["paper"] is None
    assert "rep:paper − iso" in capsys.readouterr().out
