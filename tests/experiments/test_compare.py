"""The grid: equal true ε, equal effort, nothing run twice, intervals that are paired, and words about what ε covers."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import numpy as np
import pytest
from scipy.stats import ttest_rel

from erlangen.cli.compare import leave
from erlangen.experiments import comparison_table, tuning
from erlangen.experiments.compare import Comparison, Work, compare, execute, plan, with_pairs
from erlangen.experiments.pool import Pool
from erlangen.training import TrainConfig
from erlangen.training.config import ConfigError

BASE = TrainConfig(model="mlp", model_options={"width": 8}, steps=4, batch=128, evaluations=1)
SPEC = Comparison(BASE, ("iso", "rep"), (4.0,), seeds=2, trials=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, compare(SPEC, out)


def test_all_cells_have_the_same_true_epsilon(finished):
    _, result = finished
    spent = {row["epsilon"]["pld"] for row in result["rows"]}
    assert len(spent) == 1
    assert 3.9 < spent.pop() <= 4.0
    assert [(row["mechanism"], row["seeds"]) for row in result["rows"]] == [("iso", 2), ("rep", 2)]


def test_every_cell_got_the_same_number_of_trials_and_the_best_was_taken(finished):
    _, result = finished
    by_cell = {
        row["mechanism"]: [t for t in result["trials"] if t["cell"].startswith(row["mechanism"])]
        for row in result["rows"]
    }
    assert {len(trials) for trials in by_cell.values()} == {2}
    for row in result["rows"]:
        won = tuning.best(by_cell[row["mechanism"]])
        assert (row["chosen"]["lr"], row["chosen"]["max_grad_norm"]) == (won["lr"], won["max_grad_norm"])
    assert "NOT this choice" in result["covers"]
    assert "the ε of one run" in result["covers"]


def test_finished_cells_are_not_run_again(finished, monkeypatch):
    out, result = finished
    gone = out / result["runs"][1] / "summary.json"
    gone.unlink()
    calls: list[Work] = []

    def counted(job):
        calls.append(job)
        return execute(job)

    monkeypatch.setattr("erlangen.experiments.compare.execute", counted)
    again = compare(SPEC, out)
    assert [str(job.place.relative_to(out)) for job in calls] == [result["runs"][1]]
    assert again["rows"] == result["rows"]  # seeded: the same to the last bit
    more = compare(dataclasses.replace(SPEC, seeds=3), out)
    assert len(calls) == 3  # one new seed of each cell
    assert more["rows"][0]["accuracies"][:2] == result["rows"][0]["accuracies"]


def test_a_folder_belongs_to_one_data_set(finished, tmp_path):
    out, _ = finished
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(60, 8, 8)), "y_train": np.arange(60) % 2}
    np.savez(tmp_path / "d.npz", **arrays, x_test=-arrays["x_train"], y_test=arrays["y_train"])
    other = dataclasses.replace(SPEC, base=dataclasses.replace(BASE, data=str(tmp_path / "d.npz"), batch=16))
    with pytest.raises(ConfigError, match="other data"):
        compare(other, out)
    np.savez(tmp_path / "no-test.npz", **arrays)
    with pytest.raises(ConfigError, match="x_test"):
        compare(
            dataclasses.replace(SPEC, base=dataclasses.replace(BASE, data=str(tmp_path / "no-test.npz"))),
            tmp_path / "o",
        )


def test_what_cannot_work_fails_before_anything_is_trained(tmp_path):
    from erlangen.data import load

    with pytest.raises(TypeError, match="Lipschitz network"):
        plan(dataclasses.replace(SPEC, mechanisms=("iso", "clipless")), load("digits"))
    cells = plan(
        dataclasses.replace(SPEC, mechanisms=("clipless",), models={"clipless": "lipschitz-lenet"}), load("digits")
    )
    assert cells[0].config.model == "lipschitz-lenet"
    for change, words in (
        ({"mechanisms": ("iso", "iso")}, "each once"), ({"seeds": 0}, "at least 1"), ({"held_out": 1.0}, "share"),
        ({"accounted": True, "trials": 0}, "needs trials"), ({"base": dataclasses.replace(BASE, secure=True)}, "secure"),
        ({"accounted": True, "base": dataclasses.replace(BASE, unit="patient")}, "patient with k of them"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(SPEC, **change)


def test_data_without_a_public_test_set_are_named_with_the_cure_for_folders_and_arrays(tmp_path):
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=np.zeros((8, 4, 4), np.uint8), y_train=np.arange(8) % 2)
    with pytest.raises(ConfigError, match=r"mine\.npz.*no public test set.*test/CLASS, or arrays with x_test"):
        compare(dataclasses.replace(SPEC, base=dataclasses.replace(BASE, data=str(file))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_intervals_are_paired_by_seed():
    a, b = [0.50, 0.62, 0.71, 0.55], [0.52, 0.66, 0.72, 0.58]
    rows = [
        {"mechanism": "iso", "target_epsilon": 1, "accuracies": a},
        {"mechanism": "rep", "target_epsilon": 1, "accuracies": b},
    ]
    first, second = with_pairs(rows, "iso")
    assert first["against_first"] is None
    low, high = ttest_rel(b, a).confidence_interval(0.95)
    pair = second["against_first"]
    np.testing.assert_allclose(
        (pair["mean"] - pair["half_width_95"], pair["mean"] + pair["half_width_95"]), (low, high)
    )


def test_one_table_and_one_figure(finished, tmp_path):
    _, result = finished
    files = leave(result, tmp_path)
    assert {"table.txt", "table.md", "table.csv", "figure.svg", "figure.pdf"} <= set(files)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [float(r["accuracy"]) for r in rows] == [x for row in result["rows"] for x in row["accuracies"]]
    assert "NOT this choice" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "table.md").read_text().count("\n| ") == 3
    ET.parse(tmp_path / "figure.svg")
    nasty = json.loads(json.dumps(result))
    nasty["data"]["name"] = "a|b\n<script>"
    assert "a\\|b &lt;script>" in comparison_table.markdown(nasty)


def test_the_accounted_search_is_covered_whole(tmp_path):
    spec = dataclasses.replace(SPEC, accounted=True, mechanisms=("iso",), seeds=3)
    result = compare(spec, tmp_path)
    [row] = result["rows"]
    assert row["epsilon"]["pld"] is None  # PLD cannot price a selection
    assert 3.8 < row["epsilon"]["rdp"] <= 4.0
    assert (
        row["noise_multiplier"]
        > plan(dataclasses.replace(SPEC, mechanisms=("iso",)), _digits())[0].config.noise_multiplier
    )
    drawn = [tuning.number_of_trials(2, seed) for seed in range(3)]
    assert len(result["trials"]) == sum(drawn)
    for seed in range(3):
        mine = [t for t in result["trials"] if t["seed"] == seed]
        assert row["accuracies"][seed] == tuning.best(mine)["test"]["test_accuracy"]
    assert "covers the whole search" in result["covers"]
    assert "the other trials, which are kept for study, are not covered" in result["covers"]
    assert "(RDP)" in comparison_table.text(result)


def _digits():
    from erlangen.data import load

    return load("digits")


def test_without_tuning_it_says_so(tmp_path):
    result = compare(dataclasses.replace(SPEC, trials=0, mechanisms=("iso",), seeds=1), tmp_path)
    assert result["trials"] == []
    assert result["covers"].startswith("No setting was tuned")
    assert "–" in comparison_table.text(result)


@pytest.mark.slow
def test_processes_give_the_same_results(finished, tmp_path):
    _, result = finished
    again = compare(SPEC, tmp_path, Pool(workers=2))
    assert again["trials"] == result["trials"]
    assert [r["accuracies"] for r in again["rows"]] == [r["accuracies"][:2] for r in result["rows"]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'erlangen[cluster]'")
def test_a_cluster_sends_its_files_back(finished, tmp_path):
    import ray

    _, result = finished
    try:
        again = compare(SPEC, tmp_path, Pool(cluster="local"))
    finally:
        ray.shutdown()
    assert again["trials"] == result["trials"]
    assert all((tmp_path / run / "certificate.json").is_file() for run in again["runs"])


def test_the_true_epsilon_is_rounded_up():
    assert comparison_table.true_epsilon({"epsilon": {"pld": 0.99981}}) == "0.9999 (PLD)"
    assert comparison_table.true_epsilon({"epsilon": {"rdp": 4.33512}}) == "4.336 (RDP)"
