"""A first look: small, without downloads, honest about its data, and for every table and figure of the papers."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from typer.testing import CliRunner

from erlangen.cli.main import app
from erlangen.data import datasets, load
from erlangen.experiments import Cell, Preset, presets, releases
from erlangen.experiments.presets import QUICK_BATCH, QUICK_CELLS, QUICK_STEPS, QUICK_VIEWS, spread, tables
from erlangen.experiments.quick import SIDE, said, stand_in, stand_ins
from erlangen.training.config import TrainConfig
from tests.scripts import script

PAPERS = {"rep": 3, "eq": 10, "geodp": 7, "clipless": 3, "gredp": 6}


@pytest.fixture
def nothing_here(monkeypatch, tmp_path):
    """A machine without any of the papers' data, and without a way to them."""
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ERLANGEN_OFFLINE", "1")
    releases.cifar10.cache_clear()  # other tests may have loaded a small one


def reproduce(*arguments):
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_one_preset_for_every_table_and_figure():
    assert Counter(name.split("-")[0] for name in tables()) == PAPERS
    listed = json.loads(reproduce("--list", "--json").stdout)
    assert Counter(row["name"].split("-")[0] for row in listed["presets"]) == PAPERS
    named = {part for row in [*listed["presets"], *listed["beside"]] for part in row["parts"]}
    assert named == {p.name for p in presets()}, "a preset that no list names"
    text = reproduce("--list").stdout
    assert all(name in text for name in named)


def test_spread_keeps_both_ends():
    assert spread(tuple(range(5))) == (0, 1, 2, 3, 4)
    kept = spread(tuple(range(64)))
    assert len(kept) == QUICK_CELLS == len(set(kept))
    assert (kept[0], kept[-1]) == (0, 63)
    assert {k % 4 for k in kept} == {0, 1, 2, 3}, "one method of four would never be looked at"


@pytest.mark.parametrize("name", [p.name for p in presets() if isinstance(p, Preset)])
def test_a_quick_table_is_small_whatever_the_table(name):
    quick = next(p for p in presets() if p.name == name).quick()
    assert "no result" in quick.note
    assert len(quick.cells) <= QUICK_CELLS
    assert quick.seeds == 1
    for cell in quick.cells:
        assert cell.seed_factor == 1
        assert cell.config.steps == QUICK_STEPS
        assert cell.config.views <= QUICK_VIEWS
        assert cell.config.batch <= QUICK_BATCH
        assert "weights" not in cell.config.model_options


def test_a_stand_in_lasts_as_long_as_its_block_and_leaves_nothing_behind(nothing_here):
    with pytest.raises(ValueError, match="ERLANGEN_OFFLINE"):
        load("mnist")
    with stand_ins() as used:
        assert load("rotated_mnist").input_shape == (1, 28, 28), "what is made from a data set has its stand-in too"
        assert "stand-in" in load("imagenette").name
        assert load("tiny_imagenet_200").classes == 200
        assert load("digits").name == "digits"
        assert "stand-in" in releases.cifar10().name
    assert used == ["mnist", "imagenette", "tiny_imagenet_200", "cifar10"]
    assert "erlangen data get imagenette" in said(used)
    with pytest.raises(ValueError, match="ERLANGEN_OFFLINE"):
        load("mnist")
    with pytest.raises(ValueError, match="ERLANGEN_OFFLINE"):
        releases.cifar10()  # a cached stand-in would become somebody's result
    assert said([]) == ""
    assert "imagenette" in datasets()


def test_stand_ins_are_small_images_of_the_right_classes():
    data = stand_in("imagenette")
    assert data.input_shape == (3, SIDE, SIDE)
    assert data.classes == 10
    assert set(data.y_train) == set(data.y_test) == set(range(10))


def test_data_that_is_here_is_used(monkeypatch, tmp_path):
    import numpy as np

    x, y = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=y, x_test=x + 1, y_test=y)
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    with stand_ins() as used:
        assert len(load("mnist")) == 20
    assert used == []


def test_quick_runs_on_a_bare_machine_and_says_what_it_is(nothing_here, tmp_path):
    done = reproduce("geodp-fig5", "--quick", "--only", "B=256 direction", "--json", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["quick"] is True
    assert found["stand_ins"] == ["mnist"]
    assert "no result" in found["note"]
    assert "RANDOM IMAGES" in found["note"]
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found


def test_a_table_can_begin_with_another_seed(nothing_here, tmp_path):
    seeds = ("--first-seed", "3", "--seeds", "2")
    done = reproduce("geodp-fig5", "--quick", "--only", "B=256 direction", *seeds, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.stderr
    assert {path.name.rpartition("-")[2] for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"seed3", "seed4"}
    assert reproduce("geodp-fig5", "--first-seed", "-1").exit_code == 2


def test_parts_of_a_table_do_not_share_a_folder(nothing_here, tmp_path, monkeypatch):
    """Both halves of Table 1 have a cell "Equivariant-ResNet-9 ε=2": in one folder the second would take the first's result."""

    def tiny(self):
        config = TrainConfig(data=self.cells[0].config.data, model="mlp", epsilon=None, noise_multiplier=1.0, batch=8, steps=1)
        return Preset(self.name, self.paper, self.title, 100, (Cell("one", config),), 1, "no result")

    monkeypatch.setattr(Preset, "quick", tiny)
    done = reproduce("eq-table1", "--quick", "--json", "--out", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    assert [part["stand_ins"] for part in json.loads(done.stdout)["parts"]] == [["cifar10"], ["cifar100"]]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["eq-table1", "eq-table1-cifar100"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tables()))
def test_every_quick_form_finishes(name):
    """`benchmarks/quick.py` does the same for all of them, several at a time, and prints their seconds."""
    found = script("quick").run(name, threads=len(os.sched_getaffinity(0)), limit=900)
    assert found["says_no_result"], found["error"]
    assert found["rows"]
