"""Presets are the papers' tables as data: every configuration can be built, and costs what the paper says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import erlangen.data.base
from erlangen.accounting.ledger import read_ledger
from erlangen.data.base import Dataset
from erlangen.experiments import Cell, Preset, preset, presets
from erlangen.experiments.rep import MECHANISMS, TABLE_1
from erlangen.experiments.runner import run_preset
from erlangen.mechanisms import mechanisms
from erlangen.models import make_model
from erlangen.training.config import TrainConfig
from erlangen.training.metrics import near_zero
from erlangen.training.run import Interrupted, train
from tests.training.test_devices import stop_after

SHAPES = {
    "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100), "tiny_imagenet_200": ((3, 64, 64), 200),
    "imagenette": ((3, 160, 160), 10), "rotated_mnist": ((1, 28, 28), 10), "rotated_fashion_mnist": ((1, 28, 28), 10),
}  # fmt: skip

NAMES = [p.name for p in presets() if p.name.startswith(("rep-", "eq-"))]


def test_every_table_and_figure_has_a_preset():
    tables, figures = {f"eq-table{k}" for k in (1, 4, 6, 7)}, {f"eq-fig{k}" for k in (2, 3, 4, 5)}
    expected = {"rep-table1", "rep-fig1", "rep-fig2"} | tables | figures
    assert expected <= set(NAMES)
    assert any(n.startswith("eq-table2") for n in NAMES)
    assert any(n.startswith("eq-table3") for n in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unique_and_options_are_known(name):
    chosen = preset(name)
    assert len({cell.name for cell in chosen.cells}) == len(chosen.cells)
    for cell in chosen.cells:
        assert cell.config.mechanism in mechanisms()
        assert TrainConfig.from_dict(json.loads(cell.config.to_json())) == cell.config, "not JSON"


def test_rep_epsilons_are_the_papers_to_every_digit():
    """By RDP, at the rate of 1/938: what the table's ε column says before rounding."""
    want = {1.4: 0.4838, 1.2: 0.6442, 1.0: 0.9410, 0.8: 1.6057, 0.6: 3.9669}
    chosen = preset("rep-table1")
    once = dataclasses.replace(chosen, cells=tuple(c for c in chosen.cells if c.config.mechanism == "rep"))
    for row in once.privacy():
        assert round(row["epsilon"]["rdp"], 4) == pytest.approx(want[row["noise_multiplier"]], abs=1e-9)
        assert row["epsilon"]["pld"] < row["epsilon"]["rdp"]
        assert (row["sample_rate"], row["steps"], row["delta"]) == (pytest.approx(1 / 938), 18760, 1e-5)


def test_rep_cells_hold_the_papers_numbers_and_more_seeds_where_it_is_close():
    cells = {c.name: c for c in preset("rep-table1").cells}
    assert len(cells) == len(TABLE_1) * (len(MECHANISMS) + 1)
    assert cells["σ=1.0 REP, half power"].paper is None
    assert cells["σ=1.0 REP"].paper == 72.1
    assert cells["σ=1.2 SHUFFLE"].paper == 51.8
    assert cells["σ=1.0 ISO"].seed_factor * preset("rep-table1").seeds == 20


def test_equivariant_noise_is_that_of_the_papers_epsilons():
    rows = {r["cell"]: r["epsilon"]["rdp"] for r in preset("eq-table6").privacy()}
    for epsilon in (1, 2, 3, 4, 6):
        assert rows[f"Equivariant-ResNet-9 ε={epsilon}"] == pytest.approx(epsilon, rel=0.01)
    assert rows["Equivariant-ResNet-9 ε=8"] == pytest.approx(7.871, abs=2e-3)
    tiny = next(preset("eq-table2-tiny").privacy())["epsilon"]["rdp"]  # the others are not priced
    assert tiny == pytest.approx(7.997, abs=2e-3)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("eq-") and n != "eq-fig3"])
def test_the_test_set_is_read_once(name):
    """At the end; on the way runs are kept by checkpoints alone. Figure 3 is a curve along the run."""
    for cell in preset(name).cells:
        assert (cell.config.evaluations, cell.config.checkpoints) == (1, 10)


def test_de_et_al_train_until_epsilon_is_spent():
    """Their own batch, noise and steps: each row ends at its ε by RDP, which Table 5's batch would not give."""
    cells = [cell for cell in preset("eq-table6").cells if cell.config.model == "wrn-40-4"]
    rows = {row["cell"]: row for row in preset("eq-table6").privacy()}
    for cell in cells:
        target = float(cell.name.split("ε=")[1])
        assert target * 0.998 <= rows[cell.name]["epsilon"]["rdp"] <= target
        assert (cell.config.batch, cell.config.views, cell.config.max_grad_norm) == (16384, 32, 1.0)
    everywhere = [
        c for p in presets() if p.name.startswith("eq-table1") for c in p.cells if c.config.model == "wrn-40-4"
    ]
    assert {c.config.views for c in everywhere} == {32}
    steps = {c.name: c.config.steps for c in everywhere}
    assert steps["WRN-40-4 ε=2"] / steps["WRN-40-4 ε=8"] == pytest.approx(41.3 / 69.5, rel=0.03)  # as their GPU hours


def test_a_number_of_the_paper_stands_at_one_epsilon_only():
    """45.65 % of SO(2) is a cell of Table 4 at ε = 2, and one of Table 7: both run with the same noise."""
    fourth = next(cell for cell in preset("eq-table4").cells if cell.name == "SO(2)")
    seventh = [cell for cell in preset("eq-table7").cells if cell.paper == fourth.paper]
    assert [cell.config for cell in seventh] == [fourth.config]
    rows = {row["cell"]: row["epsilon"]["rdp"] for row in preset("eq-table7").privacy()}
    for name, epsilon in rows.items():
        assert epsilon == pytest.approx(float(name.split("ε=")[1]), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_network_of_a_preset_can_be_built_and_run(name):
    for cell in preset(name).cells:
        shape, classes = SHAPES[cell.config.data]
        model = make_model(cell.config.model, shape, classes, **cell.config.model_options)
        assert model(torch.zeros(1, *shape)).shape == (1, classes)


@pytest.fixture
def toy(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (60, 1, 8, 8)).astype(np.float32), np.arange(60) % 2
    monkeypatch.setitem(erlangen.data.base._DATASETS, "toy", lambda: Dataset("toy", x, y, x[:20], y[:20], 2))


def small(together: bool) -> Preset:
    config = TrainConfig(
        data="toy", model="c8-cnn", model_options={"field_counts": [1], "kernel_size": 3}, epsilon=None,
        noise_multiplier=1.0, batch=8, steps=3, lr=0.1, momentum=0.0, device="cpu",
    )  # fmt: skip
    cells = (
        Cell("ISO", config, 50.0),
        Cell("REP", dataclasses.replace(config, mechanism="rep"), seed_factor=2),
        Cell("brier", config, unit="Brier score", measure="brier"),
        Cell("small", config, unit="parameters below 0.001, %", measure="small_parameters"),
    )
    return Preset("toy", "nobody", "toy", 60, cells, seeds=2, together=together)


@pytest.mark.parametrize("together", [True, False])
def test_a_preset_runs_and_goes_on_where_it_stopped(tmp_path, toy, together):
    seen = []
    result = run_preset(small(together), tmp_path, watch=lambda name, seed, _: seen.append((name, seed)))
    rows = {row["cell"]: row for row in result["rows"]}
    assert [rows[n]["seeds"] for n in ("ISO", "REP", "brier")] == [2, 4, 2]
    assert len(seen) == 10
    assert 0 <= rows["ISO"]["mean"] <= 100
    assert 0 < rows["brier"]["mean"] < 1
    assert 0 < rows["ISO"]["epsilon"]["pld"] < rows["ISO"]["epsilon"]["rdp"] * 1.01
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/summary.json")}
    (tmp_path / "iso-seed1" / "summary.json").unlink()
    assert run_preset(small(together), tmp_path)["rows"][1] == result["rows"][1]
    after = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/summary.json")}
    assert [p.parent.name for p in before if before[p] != after[p]] == ["iso-seed1"]


def test_a_run_that_was_stopped_is_resumed_and_one_that_crashed_is_made_anew(tmp_path, toy):
    iso = small(together=False).cells[0]
    cell = dataclasses.replace(iso, config=dataclasses.replace(iso.config, steps=5, evaluations=1))
    alone = dataclasses.replace(small(together=False), cells=(cell,), seeds=1)
    folders = {name: tmp_path / name / "iso-seed0" for name in ("whole", "stopped", "crashed")}
    run_preset(alone, tmp_path / "whole")
    config = TrainConfig.from_file(folders["whole"] / "config.json")
    for name in ("stopped", "crashed"):
        with pytest.raises(Interrupted):
            train(config, folders[name], watch=stop_after(2))
    for ledger in folders["crashed"].glob("ledger.jsonl*"):  # what a settled reservation gives back was not written
        ledger.write_text("".join(line for line in ledger.read_text().splitlines(keepends=True) if "unused" not in line))
    for name in ("stopped", "crashed"):
        run_preset(alone, tmp_path / name)
    steps = {name: [json.loads(line)["step"] for line in (f / "metrics.jsonl").open()] for name, f in folders.items()}
    assert steps == {"whole": [5], "stopped": [2, 5], "crashed": [5]}
    weights = {name: load_file(str(f / "weights.safetensors")) for name, f in folders.items()}
    for name in ("stopped", "crashed"):
        assert all(torch.equal(w, weights["whole"][n]) for n, w in weights[name].items())
        assert read_ledger(folders[name] / "ledger.jsonl").steps == 5


def test_runs_side_by_side_are_the_same_runs(tmp_path):
    config = TrainConfig(
        data="digits", model="cnn", epsilon=None, noise_multiplier=1.0, batch=16, steps=2, lr=0.1, device="cpu",
        evaluations=1,
    )  # fmt: skip
    cells = (Cell("ISO", config), Cell("REP", dataclasses.replace(config, lr=0.3), against=("ISO",)))
    both = Preset("digits", "nobody", "digits", 1437, cells, seeds=2, train_records=200)
    seen = []
    (tmp_path / "alone").mkdir()
    alone = run_preset(both, tmp_path / "alone")
    (tmp_path / "apart").mkdir()
    apart = run_preset(both, tmp_path / "apart", watch=lambda *key: seen.append(key[:2]), workers=2)
    assert apart["rows"] == alone["rows"]
    assert sorted(seen) == [("ISO", 0), ("ISO", 1), ("REP", 0), ("REP", 1)]
    (tmp_path / "apart" / "iso-seed1" / "summary.json").unlink()
    assert run_preset(both, tmp_path / "apart", workers=2)["rows"] == alone["rows"]


def test_networks_of_all_groups_have_about_as_many_parameters():
    """What differs is the symmetry: the number of fields follows the order of the group, in all three widths."""
    sizes = {}
    for cell in preset("eq-groups").cells:
        model = make_model(cell.config.model, (3, 32, 32), 10, **cell.config.model_options)
        sizes[cell.name] = sum(p.numel() for p in model.parameters())
        assert (cell.config.epsilon, cell.config.steps) == (2.0, 270)
    assert len(sizes) == 8
    assert max(sizes.values()) < 1.2 * min(sizes.values()), sizes


def test_small_parameters():
    assert near_zero([torch.tensor([0.0, 1.0]), torch.tensor([[1e-4], [-5.0]])]) == 0.5


def test_a_table_split_by_data_stands_for_its_parts():
    from erlangen.experiments.presets import parts

    assert [p.name for p in parts("rep-table1")] == ["rep-table1"]
    assert [p.name for p in parts("eq-table1")] == ["eq-table1", "eq-table1-cifar100"]
    assert len(parts("eq-table3")) == 4
    assert [p.name for p in parts("eq-tuned")] == ["eq-tuned"]  # a recipe and its trials are two things
    with pytest.raises(ValueError, match="no preset is called 'eq-table9'"):
        parts("eq-table9")
