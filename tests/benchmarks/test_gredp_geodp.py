"""The frequency and direction benchmark: equal effort, true noise, common seeds, and a run that goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

import erlangen.training.ensemble
from erlangen.accounting import epsilon, gaussian, poisson
from erlangen.data.base import Dataset
from erlangen.experiments.presets import preset
from erlangen.training.config import TrainConfig
from tests.scripts import script

tasks = script("gredp_geodp_tasks")
gredp = tasks.gredp
bench = script("gredp_geodp")
tables = script("gredp_geodp_tables")


def spent(sigma: float, batch: int, records: int, steps: int, method: str) -> float:
    return epsilon([(poisson(batch / records, gaussian(sigma)), steps)], 1e-5, method)


@pytest.mark.parametrize("target", gredp.SIGMAS)
def test_stored_noise_is_what_it_says(target):
    for sigma, method in zip(gredp.SIGMAS[target], ("pld", "rdp"), strict=True):
        assert 0.996 * target < spent(sigma, 500, 60_000, 1200, method) <= target


def test_stored_noise_of_other_batches_and_data():
    for batch, sigmas in gredp.BATCH_SIGMAS.items():
        assert 1.99 < spent(sigmas[0], batch, 60_000, round(600_000 / batch), "pld") <= 2.0
        assert 1.99 < spent(sigmas[1], batch, 60_000, round(600_000 / batch), "rdp") <= 2.0
    for batch, sigmas in gredp.CIFAR_BATCH_SIGMAS.items():
        for sigma, method in zip(sigmas, ("pld", "rdp"), strict=True):
            assert 1.99 < spent(sigma, batch, 50_000, round(1_500_000 / batch), method) <= 2.0
    for target, sigmas in gredp.CIFAR_SIGMAS.items():
        for sigma, method in zip(sigmas, ("pld", "rdp"), strict=True):
            assert 0.996 * target < spent(sigma, 500, 50_000, 3000, method) <= target


@pytest.mark.parametrize("name", ["gredp-table1", "gredp-alexnet", "gredp-fig4", "gredp-fig4-model3"])
def test_filtered_norms_are_not_measured_for_those_that_filter_nothing(name):
    task = tasks.TASKS[name]
    filtered = {task.shape(m, s) for m in task.methods if "Spectral" in m for s in task.where(m, tuple(task.settings))}
    others = {task.shape(m, s) for m in task.methods if "Spectral" not in m for s in task.where(m, tuple(task.settings))}
    assert filtered
    assert not filtered & others


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_method_has_the_same_number_of_trials(name):
    """Of GeoDP's Table III the baseline has more."""
    task = tasks.TASKS[name]
    trials = {method: len(task.grid(method)) for method in task.methods}
    assert len({n for method, n in trials.items() if (name, method) != ("geodp-table3", "DP")}) == 1
    assert trials.get("DP", 0) in (0, max(trials.values()))
    for method in task.methods:
        for setting in task.where(method, tuple(task.settings)):
            for pick in (*task.grid(method), *task.fixed(method)):
                config = task.config(method, setting, pick, 0, "cpu")
                moved = config.lr * config.max_grad_norm / (1 - config.momentum)
                assert math.isclose(moved, pick[0])
                assert ("as published" in method) == bool(config.mechanism_options.get("as_published"))
                assert not (config.mechanism == "gredp" and "claimed" in setting) or "as published" in method


def small() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.random((240, 1, 28, 28), np.float32), rng.integers(0, 10, 240)
    return Dataset("mnist", x, y, x[:30], y[:30], 10)


def options(tmp_path: Path, **changes) -> argparse.Namespace:
    values = {
        "data": tmp_path, "out": tmp_path / "out.json", "tasks": ["geodp-fig5"], "seeds": 2, "tune_seeds": 1, "members": 48,
        "budget": math.inf, "steps": 1, "epsilon": False, "no_graph": True, "processes": 0, "resume": True, "device": "cpu",
        "methods": None, "picks": None,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(bench, "load", lambda name: small())
    bench.dataset.cache_clear()
    yield
    bench.dataset.cache_clear()


def test_what_stopped_goes_on_and_nothing_runs_twice(tmp_path, data, capsys):
    bench.Tables(options(tmp_path, budget=0.0)).main()
    assert "out of time" in capsys.readouterr().out
    bench.Tables(options(tmp_path)).main()
    first = json.loads((tmp_path / "out.json").read_text())
    keys = [json.dumps(row["key"]) for row in first["runs"]]
    assert len(set(keys)) == len(keys)
    task = tasks.TASKS["geodp-fig5"]
    assert len(first["tuning"]) == len(task.methods) * len(task.settings) * 6
    assert {(r["method"], r["setting"]) for r in first["table"]} == {
        (m, s) for m in task.methods for s in task.settings
    }
    bench.Tables(options(tmp_path)).main()
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == first["runs"]


def test_ablations_share_what_was_trained_with_the_same_options(tmp_path, data, capsys):
    """Figure 5's learning rate of 0.1 is the clipping bound of 1 in Table 3 at ε = 2; nothing else is common to both."""
    bench.Tables(options(tmp_path, tasks=["gredp-table3"], seeds=1, methods=["DP-SGD"])).main()
    bench.Tables(options(tmp_path, tasks=["gredp-fig5"], seeds=2, methods=["DP-SGD"])).main()
    assert "gredp-fig5: 1 of 10 runs are those of other tables" in capsys.readouterr().out
    rows = {tuple(row["key"]): row for row in json.loads((tmp_path / "out.json").read_text())["runs"]}
    (shared,) = [row for row in rows.values() if "as" in row]
    assert shared["key"] == ["gredp-fig5", "DP-SGD", "ε=2 true", 1.0, 1.0, 0.9, 0]
    assert shared["as"] == ["gredp-table3", "DP-SGD", "ε=2 true", 1.0, 1.0, 0.9, 0]
    assert shared["test_loss"] == rows[tuple(shared["as"])]["test_loss"]
    assert len(rows) == 8 + 10
    one, other = (bench.Trial(*key) for key in (shared["key"], shared["as"]))
    assert one.config("cpu") == other.config("cpu")


def test_runs_that_are_compared_in_pairs_are_not_taken_from_elsewhere(tmp_path, data, capsys):
    """Tuned tables have batches in common from row to row, which those of another table do not."""
    for name in ("gredp-table3", "gredp-table1"):
        bench.Tables(options(tmp_path, tasks=[name], seeds=1, methods=["DP-SGD"])).main()
    assert "of other tables" not in capsys.readouterr().out


def test_runs_of_other_conditions_are_not_mixed(tmp_path, data, monkeypatch):
    name = "geodp-fig5c-noiseless"
    bench.Tables(options(tmp_path, tasks=[name], seeds=1)).main()
    with pytest.raises(SystemExit, match="rows with steps = 1, and now it is 0"):
        bench.Tables(options(tmp_path, steps=0))
    changed = dataclasses.replace(tasks.TASKS[name], common={**tasks.TASKS[name].common, "ema": 0.9})
    monkeypatch.setitem(tasks.TASKS, name, changed)
    with pytest.raises(SystemExit, match=rf"{name} \| σ=0 \| DP = .*'ema': 0.0.* now it is .*'ema': 0.9"):
        bench.Tables(options(tmp_path, tasks=[name])).main()


def test_tuning_never_sees_the_test_set(data):
    held, whole = bench.dataset("mnist", "tuning"), bench.dataset("mnist", "runs")
    assert len(held) == 220
    assert np.array_equal(held.x_test, whole.x_train[220:])
    assert len(whole) == 240


def test_runs_of_a_seed_share_weights_and_batches_but_no_noise(data):
    pick = (1.0, 1.0, 0.0)
    trials = [bench.Trial("gredp-table1", m, "true", *pick, seed) for m in ("DP-SGD", "GReDP") for seed in (0, 1)]
    configs = [tasks.shortened(t.config("cpu"), 2) for t in trials]
    build = lambda: erlangen.training.ensemble.Ensemble(configs, small(), run_ids=[t.pair for t in trials])  # noqa: E731
    ensemble = build()
    a, b, c, d = ensemble.stack.flat
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert not torch.equal(a, b)
    table, _ = ensemble.batches.draw(2)
    assert np.array_equal(table[:, 0], table[:, 2])
    assert not np.array_equal(table[:, 0], table[:, 1])
    trained = build()
    trained.run()
    moved = trained.stack.flat - ensemble.stack.flat
    noise = moved[0] - moved[2]  # the same gradients: what differs is the noise of two members
    scale = configs[0].lr * configs[0].noise_multiplier / configs[0].batch * math.sqrt(2 * 2)
    assert 0.9 < float(noise.std()) / scale < 1.1


@pytest.mark.parametrize("name", [n for n, task in tasks.TASKS.items() if any(s.endswith("claimed") for s in task.settings)])
def test_what_is_claimed_is_paired_with_what_is_true(name):
    """Differences of as-published rows to their rivals are of runs with the same weights and batches."""
    task, pick = tasks.TASKS[name], (1.0, 1.0, 0.9)
    pairs = {s: bench.Trial(name, next(iter(task.methods)), s, *pick, 0).pair for s in task.settings}
    assert all(pairs[s] == pairs.get(s.replace("claimed", "true"), pairs[s]) for s in pairs)
    assert len(set(pairs.values())) == len({s.replace("claimed", "true") for s in pairs}), "other levels have other batches"


@pytest.mark.parametrize("name", [task.name for task in gredp.CIRCULANT_ABLATIONS])
def test_circulant_ablations_differ_in_their_layers_alone(name):
    """The same settings, steps and batches of every method that the dense table has."""
    task, pick = tasks.TASKS[name], (1.0, 1.0, 0.9)
    plain = tasks.TASKS[task.beside]
    assert {f"{method}, circulant" for method in plain.methods} == set(task.methods)
    for method in plain.methods:
        blocks = f"{method}, circulant"
        assert task.fixed(blocks) == plain.fixed(method)
        for setting in plain.where(method, tuple(plain.settings)):
            here, there = bench.Trial(name, blocks, setting, *pick, 0), bench.Trial(plain.name, method, setting, *pick, 0)
            assert here.pair == there.pair
            assert here.family != there.family, "they do not train as one ensemble"
            assert here.conditions == {**there.conditions, "model_options": {"circulant": 4}}


def test_a_method_that_no_task_has_is_refused_by_name(tmp_path, monkeypatch, capsys):
    """It trained nothing, and said nothing."""
    command = ["gredp_geodp.py", "--data", str(tmp_path), "--out", str(tmp_path / "x.json"), "--tasks", "gredp-table1"]
    monkeypatch.setattr("sys.argv", [*command, "--methods", "DP-SGD", "Spectral"])
    with pytest.raises(SystemExit):
        bench.main()
    said = capsys.readouterr().err
    assert "--methods has 'Spectral'; gredp-table1 have " in said
    assert "Spectral-DP" in said


def test_differences_are_paired_by_seed():
    runs = [
        {"key": ["gredp-table1", m, "true", 1.0, 1.0, 0.9, s], "test_accuracy": v}
        for m, s, v in [("DP-SGD", 0, 0.9), ("DP-SGD", 1, 0.5), ("GReDP", 0, 0.91), ("GReDP", 1, 0.51)]
    ]
    row = next(r for r in bench.table(runs) if r["method"] == "GReDP")
    paired = row["paired"]["DP-SGD momentum 0.9"]
    assert math.isclose(paired["mean"], 1.0)
    assert paired["standard_error"] < 1e-9
    assert paired["seeds"] == 2


def test_the_truth_is_added_afterwards():
    key = lambda method, setting: {"key": ["gredp-table1", method, setting, 1.0, 1.0, 0.9, 0]}  # noqa: E731
    found = bench.true_epsilons([key("GReDP", "true"), key("GReDP as published", "claimed")])
    assert 0.99 < found["gredp-table1 | true | GReDP"]["pld"] <= 1.0
    assert found["gredp-table1 | claimed | GReDP as published"]["pld"] > 1.6
    geodp = bench.true_epsilons([{"key": ["geodp-fig5", "GeoDP as published β=1", "σ=10", 1.6, 0.1, 0.0, 0]}])
    assert next(iter(geodp.values())) == {"pld": "inf", "rdp": "inf"}


def test_a_row_is_what_tuning_chose_beside_its_rivals():
    key = lambda method, pick, seed: ["geodp-table2", method, "σ=10", *pick, seed]  # noqa: E731
    a, b = (0.8, 0.1, 0.0), (3.2, 0.1, 0.9)
    ours, theirs, method = [0.90, 0.92, 0.95], [0.80, 0.85, 0.84], "GeoDP as published β=0.1"
    tuning = [{"key": key("DP", a, 1000), "test_accuracy": 0.5}, {"key": key("DP", b, 1000), "test_accuracy": 0.4}]
    runs = [{"key": key("DP", a, s), "test_accuracy": v} for s, v in enumerate(theirs)]
    runs += [{"key": key("DP", b, s), "test_accuracy": 0.99} for s in range(3)]  # better, but not what was chosen
    runs += [{"key": key(method, a, s), "test_accuracy": v} for s, v in enumerate(ours)]
    *_, chosen, _, row = tables.table({"tuning": tuning, "runs": runs}, "geodp-table2", "test_accuracy").splitlines()
    assert "| DP | " in chosen  # the other pick is said to be another
    interval = ttest_rel(ours, theirs).confidence_interval(0.95)
    mean, half = 50 * (interval.low + interval.high), 50 * (interval.high - interval.low)
    assert f"| {method} | ∞ / ∞ | 8 | 0.1 | 0 |" in row
    assert f"{mean:+.2f} ± {half:.2f}" in row


def test_pairs_are_taken_together():
    values = {"DP": (0.5, 0.6), "direction": (0.53, 0.62), "shrink": (0.51, 0.65, 0.9)}
    runs = [
        {"key": ["geodp-table2", method, "σ=10", 3.2, 0.1, 0.0, seed], "test_accuracy": v}
        for method, row in values.items() for seed, v in enumerate(row)
    ]  # fmt: skip
    found = tables.pooled({"tuning": [], "runs": runs}, "geodp-table2", "test_accuracy", ["direction", "DP", "shrink", "DP"])
    interval = ttest_rel([53, 62, 51, 65], [50, 60, 50, 60]).confidence_interval(0.95)
    assert found == f"{np.mean([3, 2, 1, 5]):+.2f} ± {(interval.high - interval.low) / 2:.2f} (4 pairs)"
    with pytest.raises(SystemExit, match="two by two"):
        tables.pooled({"tuning": [], "runs": runs}, "geodp-table2", "test_accuracy", ["direction"])
    with pytest.raises(SystemExit, match="'Direction'"):
        tables.pooled({"tuning": [], "runs": runs}, "geodp-table2", "test_accuracy", ["Direction", "DP"])


# -- companions ---------------------------------------------------------------------------------------------------------


def tuned(task: str, method: str, setting: str, best: tuple[float, float, float]) -> list[dict]:
    """A whole grid of trials, one of them the best."""
    grid = tasks.TASKS[task].grid(method)
    assert best in grid
    return [{"key": [task, method, setting, *pick, 1000], "test_accuracy": 0.9 - 0.5 * (pick != best)} for pick in grid]


def companions(tmp_path: Path, rows: list[dict], methods: list[str], **changes) -> list[list]:
    source = tmp_path / "base.json"
    source.write_text(json.dumps({"tuning": rows, "runs": []}))
    what = {"tasks": ["geodp-table2-companions"], "methods": methods, "picks": source, "seeds": 1}
    bench.Tables(options(tmp_path, **{**what, **changes})).main()
    return [row["key"] for row in json.loads((tmp_path / "out.json").read_text())["runs"]]


@pytest.mark.parametrize("name", ["geodp-table2", "geodp-table3"])
def test_companions_are_the_rows_of_the_paper_that_the_base_lacks(name):
    from erlangen.experiments import geodp

    rows = {"geodp-table2": geodp.ROWS_2, "geodp-table3": geodp.ROWS_3}[name]
    base, more = tasks.TASKS[name], tasks.TASKS[f"{name}-companions"]
    for method, batch, beta, _ in rows:
        head, *extras = method.split("+")
        label = "+".join([head if beta is None else f"GeoDP as published β={beta:g}", *extras])
        task, label = (more, f"{label} B=8192") if batch == 8192 else (base if label in base.methods else more, label)
        config = task.config(label, next(iter(task.settings)), (1.0, 0.1, 0.0), 0, "cpu")
        expected = geodp._method(method)
        assert (config.batch, config.steps) == (
            batch,
            (geodp.TABLE_2 if base is tasks.geodp.TABLE_II else geodp.TABLE_3).steps[batch],
        )
        assert config.mechanism_options.get("beta") == beta
        for option in ("mechanism", "sampling", "selective", "clipping"):
            assert getattr(config, option) == expected.get(option, getattr(TrainConfig(), option))
        assert tasks.TASKS[task.name].methods[label].alone == ("IS" in extras or "SUR" in extras)


def test_companions_take_what_was_tuned_for_their_base(tmp_path, data):
    plain, psac, angles = (3.2, 1.0, 0.9), (12.8, 0.1, 0.0), (0.8, 1.0, 0.0)
    published = "GeoDP as published β=0.1"
    rows = tuned("geodp-table2", "DP", "σ=10", plain) + tuned("geodp-table2", "DP+PSAC", "σ=10", psac)
    rows += tuned("geodp-table2", published, "σ=10", angles)
    wanted = {"DP+IS": plain, "DP+SUR": plain, "DP+SUR+PSAC": psac, f"{published}+PSAC": angles, "DP B=8192": plain}
    runs = companions(tmp_path, rows, list(wanted))
    assert {(method, *pick) for _, method, _, *pick, _ in runs} == {(method, *pick) for method, pick in wanted.items()}
    assert {setting for _, _, setting, *_ in runs} == {"σ=10"}
    assert companions(tmp_path, rows, list(wanted)) == runs  # nothing runs twice


def test_a_half_tuned_base_is_missing_and_said_to_be(tmp_path, data, capsys):
    rows = tuned("geodp-table2", "DP", "σ=10", (3.2, 0.1, 0.0))
    assert companions(tmp_path, rows[:-1], ["DP+SUR"], out=tmp_path / "out.json") == []
    said = capsys.readouterr().out
    assert "DP+SUR at σ=10 is left out: 1 of the 12 trials of geodp-table2, DP, σ=10" in said
    assert "--picks" in said
    assert len(companions(tmp_path, rows, ["DP+SUR"])) == 1


def test_a_run_alone_starts_from_the_weights_of_its_pair(data):
    from erlangen.training.session import Session

    alone = bench.Trial("geodp-table2-companions", "DP+SUR", "σ=10", 3.2, 0.1, 0.0, 5)
    base = bench.Trial("geodp-table2", "DP", "σ=10", 3.2, 0.1, 0.0, 5)
    config = tasks.shortened(base.config("cpu"), 1)
    member = erlangen.training.ensemble.Ensemble([config], small(), run_ids=[base.pair])
    session = Session(tasks.shortened(alone.config("cpu"), 1), small(), "-".join(map(str, alone.key)))
    own = torch.cat([p.detach().flatten() for p in session.model.parameters()])
    session.model.load_state_dict(bench.start(session, alone.pair))
    paired = torch.cat([p.detach().flatten() for p in session.model.parameters()])
    assert torch.equal(paired.sort().values, member.stack.flat[0].sort().values)
    assert not torch.equal(own, paired)


def test_companions_cost_what_they_release():
    key = lambda task, method: {"key": [task, method, "σ=10", 3.2, 0.1, 0.0, 0]}  # noqa: E731
    more = "geodp-table2-companions"
    runs = [key("geodp-table2", "DP"), *(key(more, m) for m in ("DP+IS", "DP+SUR", "GeoDP as published β=0.1+SUR"))]
    plain, sampled, judged, published = (spent["pld"] for spent in bench.true_epsilons(runs).values())
    assert plain == sampled < judged < 1.1 * plain
    assert published == "inf"


def test_companions_stand_beside_the_rivals_of_their_base():
    pick = (3.2, 0.1, 0.0)
    runs = [{"key": ["geodp-table2", "DP", "σ=10", *pick, s], "test_accuracy": 0.9} for s in range(2)]
    runs += [{"key": ["geodp-table2-companions", "DP+SUR", "σ=10", *pick, s], "test_accuracy": 0.92} for s in range(2)]
    row = next(r for r in bench.table(runs) if r["method"] == "DP+SUR")
    assert math.isclose(row["paired"]["DP momentum 0"]["mean"], 2.0)
    line = tables.table({"tuning": [], "runs": runs}, "geodp-table2-companions", "test_accuracy").splitlines()[-1]
    assert "+2.00 ± 0.00" in line


def test_a_method_that_fails_is_named_and_the_others_run(tmp_path, data, monkeypatch):
    real = bench.one

    def broken(job):
        if job[0].method == "DP+IS":
            raise RuntimeError("no such kernel")
        return real(job)

    monkeypatch.setattr(bench, "one", broken)
    with pytest.raises(SystemExit, match=r"DP\+IS failed: no such kernel"):
        companions(tmp_path, tuned("geodp-table2", "DP", "σ=10", (3.2, 0.1, 0.0)), ["DP+IS", "DP+SUR"])
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [row["key"][1] for row in runs] == ["DP+SUR"]


@pytest.mark.parametrize(
    ("task", "method", "table", "cell"),
    [
        ("gredp-table1-layers", "Spectral-DP as published", "gredp-table1", "LeNet-5 Spectral-DP as published"),
        *(
            (f"gredp-{name}-layers", f"GReDP as published, {reading}", "gredp-table1", f"{label} GReDP as published, {called}")
            for name, label in (("table1", "LeNet-5"), ("model3", "Model-3"), ("resnet20", "ResNet-20"), ("alexnet", "AlexNet"))
            for reading, called in (("complex", "each layer clipped"), ("real", "real"), ("per-sample", "per-sample"))
        ),
        ("gredp-table1-noise-free", "no privacy", "gredp-table1", "LeNet-5 plain"),
        ("gredp-resnet20-noise-free", "no privacy", "gredp-table1", "ResNet-20 plain"),
        ("geodp-table2-noise-free", "no privacy", "geodp-table2", "noise-free B=512"),
        ("geodp-table3-noise-free", "no privacy", "geodp-table3", "noise-free B=512"),
    ],
)
def test_rows_that_are_not_tuned_are_those_of_the_preset(task, method, table, cell):
    own = tasks.TASKS[task]
    (pick,), (setting,) = own.fixed(method), own.settings
    config = own.config(method, setting, pick, 0, "cpu")
    theirs = next(c.config for c in preset(table).cells if c.name == cell)
    same = ("data", "model", "batch", "steps", "momentum", "max_grad_norm", "clipping", "mechanism", "mechanism_options", "ema")
    for name in same:
        assert getattr(config, name) == getattr(theirs, name), name
    assert math.isclose(config.lr, theirs.lr)
    assert (config.noise_multiplier == 0) == (theirs.noise_multiplier == 0)


def test_what_clips_each_layer_trains_together(tmp_path, data, capsys):
    bench.Tables(options(tmp_path, tasks=["gredp-table1-layers"], seeds=2)).main()
    assert "runs gredp-table1-layers layers: 8 runs" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert {row["key"][1] for row in rows} == set(gredp.LAYERED)


def test_looks_on_the_way_change_nothing_and_end_at_the_end(tmp_path, data, monkeypatch):
    """Figure 3: the curve is that of the run that a table without looks has."""
    quiet = options(tmp_path, tasks=["gredp-fig5"], seeds=1, steps=5, methods=["DP-SGD"], resume=False)
    bench.Tables(quiet).main()
    plain = json.loads((tmp_path / "out.json").read_text())["runs"]
    monkeypatch.setitem(bench.TASKS, "gredp-fig5", dataclasses.replace(tasks.TASKS["gredp-fig5"], looks=3))
    bench.Tables(quiet).main()
    for row, before in zip(json.loads((tmp_path / "out.json").read_text())["runs"], plain, strict=True):
        assert [look["step"] for look in row["curve"]] == [1, 3, 5]
        assert row["test_accuracy"] == row["curve"][-1]["test_accuracy"]
        assert row["test_loss"] == before["test_loss"]
        assert len({look["test_loss"] for look in row["curve"]}) == 3


@pytest.mark.parametrize("model", gredp.CIFAR_LENGTHS)
def test_table_3_takes_over_the_end_of_figure_3(model):
    figure, table = tasks.TASKS[f"gredp-fig3-{model}"], tasks.TASKS[f"gredp-table3-{model}"]
    ends = {
        bench.same(bench.Trial(task.name, method, setting, *pick, 0))
        for task in (figure,) for method in task.methods for setting in task.where(method, tuple(task.settings))
        for pick in task.fixed(method)
    }  # fmt: skip
    theirs = {
        bench.same(bench.Trial(table.name, method, setting, *pick, 0))
        for method in table.methods for setting in table.where(method, tuple(table.settings)) for pick in table.fixed(method)
    }  # fmt: skip
    assert len(ends) == 6
    assert len(ends & theirs) == 4, "all but AUTO-S and DP-SGD without momentum"


def test_a_curve_is_not_taken_from_a_run_without_looks(tmp_path, data, monkeypatch, capsys):
    """Figure 3 ends where Table 1 has been; Table 3 takes over its ends, and no curve."""
    common = {"seeds": 1, "steps": 3, "methods": ["DP-SGD"]}
    bench.Tables(options(tmp_path, tasks=["gredp-fig5"], **common)).main()
    again = dataclasses.replace(tasks.TASKS["gredp-fig5"], name="curves", looks=3)
    monkeypatch.setitem(bench.TASKS, "curves", again)
    monkeypatch.setitem(bench.TASKS, "ends", dataclasses.replace(again, name="ends", looks=1))
    bench.Tables(options(tmp_path, tasks=["curves"], resume=True, **common)).main()
    assert "those of other tables" not in capsys.readouterr().out
    bench.Tables(options(tmp_path, tasks=["ends"], resume=True, **common)).main()
    assert "ends: 5 of 5 runs are those of other tables" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert {row["key"][0]: "curve" in row for row in rows} == {"gredp-fig5": False, "curves": True, "ends": False}


@pytest.mark.parametrize("batch", gredp.CIFAR_BATCH_SIGMAS)
def test_large_batches_take_several_passes(batch, monkeypatch):
    """The rows of all members stay within what the task allows, and a pass is full."""
    monkeypatch.setattr(bench, "dataset", lambda *_: range(50_000))
    task = tasks.TASKS["gredp-fig4-resnet20"]
    configs = [task.config("DP-SGD", f"B={batch} true", (1.0, 1.0, 0.9), 0, "cpu")] * 12
    whole, rows = bench.physical_size(50_000, batch, 12), bench.part_of(task, configs)
    if batch <= 512:
        assert rows is None
        assert 12 * whole <= task.most_rows
    else:
        assert 12 * rows <= task.most_rows
        passes = math.ceil(whole / rows)
        assert passes * rows - whole < 8 * passes
