"""The runner of the clipless fronts: equal effort, rounds that wait for each other, pairs by seed, a run that continues."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from erlangen.experiments.clipless import EPSILONS, FRONTS
from tests.scripts import script

front = script("clipless_front")


@pytest.fixture
def study(monkeypatch, tmp_path):
    monkeypatch.setitem(FRONTS, "digits", replace(FRONTS["mnist"], records=1438))
    arguments = {"json": tmp_path / "front.json", "data": "digits", "methods": "optimal,iso", "seeds": 2, "steps": 2}
    built = front.Study(argparse.Namespace(**arguments, device="cpu", iso_device="cpu", resume=False))
    built.sigmas = {("digits", e): 1.0 for e in (front.TUNED_AT, *EPSILONS)}
    return built


def row(task, accuracy):
    return {**front.dataclasses.asdict(task), "accuracy": accuracy, "seconds": 0.0, "parameters": 1, "spent": 1.0}


def finish(study, tasks):
    for k, task in enumerate(tasks):
        study.keep(row(task, 0.01 * k))


def test_every_method_gets_the_same_number_of_trials():
    assert {len(first) + len(second) for first, second in front.SEARCH.values()} == {12}


def test_rounds_wait_for_each_other_and_the_front_takes_the_best(study):
    first = study.tasks()
    assert len(first) == 18
    assert {t.round for t in first} == {0}
    finish(study, first)
    second = study.tasks()
    assert len(second) == 6
    for task in second:  # variations of the best of the first round, which came last
        best = front.SEARCH["iso" if task.method == "iso" else "clipless"][0][-1]
        assert sum(task.setting.get(k) != v for k, v in best.items()) in (0, 1, 2)
    finish(study, second)
    final = study.tasks()
    assert [(t.seed, t.epsilon) for t in final if t.method == "iso"] == [(s, e) for s in (0, 1) for e in EPSILONS]
    assert all(t.round is None and t.setting == study.best("digits", t.method, 1) for t in final)


def test_equal_bounds_make_one_run_of_global_and_local(study):
    study.methods = ["local", "global"]
    assert [t.method for t in study.tasks()] == ["local"] * 9
    finish(study, study.tasks())
    assert {t.round for t in study.tasks()} == {1}
    copies = [r for r in study.rows if r.get("same_as") == "local"]
    assert [r["method"] for r in copies] == ["global"] * 9
    overlapping = {"model": "lipschitz-patches", "model_options": {"patch": 2, "width": 4, "mix": 4}}
    assert not front.same_bounds("digits", json.dumps(overlapping))


def test_a_study_continues_where_it_stopped(study):
    finish(study, study.tasks()[:5])
    with pytest.raises(SystemExit, match="--resume"):
        front.Study(argparse.Namespace(json=study.results.path, resume=False, data="digits", methods="iso", seeds=1, steps=2,
                                       device="cpu", iso_device="cpu"))  # fmt: skip
    known = {front.named(r, front.KNOWN_BY) for r in json.loads(study.results.path.read_text())["rows"]}
    assert not known & {t.key for t in study.tasks()}
    study.failed.add(study.tasks()[0].key)
    assert len(study.tasks()) == 18 - 5 - 1


def test_one_run_trains_at_the_sampling_rate_it_stands_for(study, monkeypatch):
    monkeypatch.setattr("erlangen.experiments.clipless.BATCH", 100)
    task = next(t for t in study.tasks() if t.method == "optimal")
    trial = front.fit(task)
    final = front.fit(replace(task, round=None))
    assert 0 < trial["accuracy"] < 1
    assert trial["batch"] / final["batch"] == pytest.approx(5 / 6, abs=0.05)
    assert "spent" in final
    assert "spent" not in trial


def test_the_table_pairs_by_seed():
    def cell(method, seed, accuracy):
        return {
            "data": "d",
            "method": method,
            "epsilon": 2.0,
            "seed": seed,
            "round": None,
            "accuracy": accuracy,
            "spent": 2.0,
        }

    rows = [cell("optimal", 0, 0.8), cell("optimal", 1, 0.6), cell("iso", 1, 0.5), cell("iso", 2, 0.1)]
    last = front.table(rows).splitlines()[-1]
    assert last.startswith("| d | 2 (2.000) | 70.00 ± 14.14 | 30.00 ± 28.28 | +10.00 (n = 1) |")
