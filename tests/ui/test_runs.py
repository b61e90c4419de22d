"""States, numbers and a run that is followed while it trains."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import threading

import pytest

from erlangen.accounting import epsilon, read_ledger
from erlangen.training import TrainConfig, run
from erlangen.ui import views
from erlangen.ui.runs import Runs, Seen
from tests.ui.conftest import SMALL


def row(client, name):
    return next(r for r in client.json("api/runs")["runs"] if r["name"] == name)


def settled(client):
    """The listing once every certificate has been recomputed."""
    for _ in range(20):
        rows = {r["name"]: r for r in client.json("api/runs")["runs"]}
        if all(r["epsilon"] is not None for r in rows.values()):
            return rows
    raise AssertionError("some certificates were never looked at")


def test_finished_runs_with_their_true_figures(client, folder):
    rows = settled(client)
    summary = json.loads((folder / "first" / "summary.json").read_text())
    first = rows["first"]
    assert first["state"] == "finished"
    assert first["steps"] == first["planned"] == 6
    assert first["accuracy"] == summary["test"]["test_accuracy"]
    events = read_ledger(folder / "first" / "ledger.jsonl").pairs()
    assert first["epsilon"] == pytest.approx(epsilon(events, first["delta"]), rel=1e-6)
    assert len(rows) == 4


def test_a_forged_certificate_is_no_guarantee(client):
    """The broken twin of the run above: its certificate counts two of six releases."""
    forged = settled(client)["forged"]
    assert forged["epsilon"] == "inf"
    assert "does not hold" in forged["problem"]


def test_a_copied_folder_is_the_run_that_it_was(folder, tmp_path):
    """A copy's files are new, in any order. It was shown as interrupted, with the ε of its ledger, and nobody looked at its
    certificate."""
    for name, evaluated in (("first", "finished"), ("forged", "finished"), ("first", "interrupted")):
        copy = tmp_path / f"{name}-{evaluated}"
        shutil.copytree(folder / name, copy)
        for age, file in enumerate(sorted(copy.iterdir(), key=lambda path: path.name == "metrics.jsonl")):
            os.utime(file, (1e9 + age, 1e9 + age))
        if evaluated == "interrupted":  # set back and resumed: an earlier step follows the last one
            metrics = copy / "metrics.jsonl"
            metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[1] + "\n")
    seen = {run.name: run for run in Runs(tmp_path).listing()}
    assert {name: run.state for name, run in seen.items()} == {
        "first-finished": "finished", "forged-finished": "finished", "first-interrupted": "interrupted"
    }  # fmt: skip
    assert seen["first-finished"].epsilon == Runs(folder).one("first").epsilon
    assert seen["forged-finished"].epsilon == math.inf
    assert "does not hold" in seen["forged-finished"].problem


def test_an_unreadable_run_is_said_and_hides_no_other(client):
    rows = settled(client)
    assert rows["broken"]["state"] == "unreadable"
    assert rows["broken"]["epsilon"] == "inf"
    assert rows["broken"]["problem"]


def test_certificates_are_not_believed_before_they_were_recomputed(folder, monkeypatch):
    monkeypatch.setattr("erlangen.ui.runs.PATIENCE", -1.0)
    rows = {seen.name: seen for seen in Runs(folder).listing()}
    assert rows["first"].epsilon is None
    assert rows["first"].accuracy is not None


def test_details_and_comparison_hold_figures_with_words_and_data(client):
    found = client.json("api/run", [("name", "first")])
    assert [f["key"] for f in found["figures"]] == ["training", "spending", "attacker", "calibration", "confusion"]
    assert all(f["alt"] and f["caption"] and f["body"] and f["plot"]["data"] for f in found["figures"])
    assert found["statement"]["headline"].startswith("Each record is protected")
    assert ["mechanism", "iso"] in found["options"]
    other = next(r["name"] for r in client.json("api/runs")["runs"] if r["name"].startswith("nested"))
    both = client.json("api/compare", [("name", "first"), ("name", other)])
    assert [f["key"] for f in both["figures"]] == ["pareto", "progress"]
    assert len(both["rows"]) == 2


def test_options_do_not_say_where_the_owner_keeps_the_data():
    config = dataclasses.replace(SMALL, data="/home/owner/scans.npz", data_options={"unit_csv": "/home/owner/patients.csv"})
    shown = dict(views.detail(Seen("first", "interrupted", config))["options"])
    assert shown["data"] == "scans.npz"
    assert shown["data_options"] == '{"unit_csv": "patients.csv"}'


def test_a_live_run_is_followed(client, folder):
    """Training in a thread that waits for the test at two of its steps: running, growing, finished."""
    name, gates = "live", {4: threading.Event(), 8: threading.Event()}
    arrived = {step: threading.Event() for step in gates}

    def watch(session, metrics):
        if session.step_count in gates:
            arrived[session.step_count].set()
            assert gates[session.step_count].wait(60)

    config = TrainConfig.from_dict({**json.loads(SMALL.to_json()), "steps": 12, "evaluations": 12, "seed": 5})
    thread = threading.Thread(target=run.train, args=(config, folder / name), kwargs={"watch": watch})
    thread.start()
    try:
        seen = []
        for step in gates:
            assert arrived[step].wait(60)
            seen.append(client.json("api/run", [("name", name)]))
            gates[step].set()
        thread.join(60)
        done = client.json("api/run", [("name", name)])
        assert [s["state"] for s in (*seen, done)] == ["running", "running", "finished"]
        assert [s["steps"] for s in (*seen, done)] == [4, 8, 12]
        assert [s["evaluations"] for s in (*seen, done)] == [4, 8, 12]
        assert seen[0]["epsilon"] <= seen[1]["epsilon"] <= done["epsilon"] * (1 + 1e-9)
        curve = [next(f for f in s["figures"] if f["key"] == "training")["plot"]["data"] for s in (*seen, done)]
        spent = [next(t["y"] for t in c if t["name"] == "ε spent") for c in curve]
        assert [len(s) for s in spent] == [4, 8, 12]
        assert spent[2] == sorted(spent[2])
        for s, used in zip(seen, spent):  # what is reserved on disk is never less than what was used
            assert s["epsilon"] >= used[-1] * (1 - 1e-9)
    finally:
        for gate in gates.values():
            gate.set()
        thread.join(60)
        shutil.rmtree(folder / name, ignore_errors=True)


def test_an_interrupted_run_counts_what_its_ledger_counts(client, folder):
    def watch(session, metrics):
        if session.step_count == 3:
            raise KeyboardInterrupt

    target = folder / "stopped"
    with pytest.raises(run.Interrupted):
        run.train(SMALL, target, watch=watch)
    try:
        found = row(client, "stopped")
        assert found["state"] == "interrupted"
        assert found["steps"] == 3
        assert found["epsilon"] == pytest.approx(epsilon(read_ledger(target / "ledger.jsonl").pairs(), found["delta"]))
        (target / "ledger.jsonl").unlink()
        (target / "ledger.jsonl.copy").write_text("nothing")
        assert row(client, "stopped")["epsilon"] == "inf"
    finally:
        shutil.rmtree(target)


def test_an_empty_folder_is_no_error(tmp_path):
    assert Runs(tmp_path).listing() == []
