"""``--set``: JSON, words, and single entries of objects, in order, above the file's."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from erlangen.cli.main import app
from erlangen.cli.settings import assigned, assignment, configuration


def test_values_are_json_or_words():
    assert assignment("lr=0.5") == ("lr", 0.5)
    assert assignment("secure=true") == ("secure", True)
    assert assignment("data=scans=1") == ("data", "scans=1")
    with pytest.raises(typer.BadParameter, match="key=value"):
        assignment("lr")


def test_entries_of_objects_add_up_in_order():
    words = ['model_options={"depth": 2, "width": 4}', "model_options.width=8", "model_options.name=a.b"]
    assert assigned({"lr": 1}, words) == {"lr": 1, "model_options": {"depth": 2, "width": 8, "name": "a.b"}}
    before = {"model_options": {"width": 1}}
    assert assigned(before, ["model_options.depth=3"]) == {"model_options": {"width": 1, "depth": 3}}
    assert before == {"model_options": {"width": 1}}


def test_an_entry_is_added_to_the_object_of_the_file(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": "mlp", "model_options": {"width": 8}, "epsilon": 2, "momentum": 0.1}))
    config = configuration(file, {"lr": 0.3}, ["mechanism_options.a=1", "model_options.depth=3", "noise_multiplier=1.5"])
    assert config.model_options == {"width": 8, "depth": 3}
    assert config.mechanism_options == {"a": 1}
    assert (config.epsilon, config.noise_multiplier, config.momentum, config.lr) == (None, 1.5, 0.1, 0.3)


@pytest.mark.parametrize("command", ["train", "tan"])
def test_a_noise_multiplier_replaces_the_target_of_a_run_that_was_kept(command, tmp_path):
    file = tmp_path / "config.json"  # as a run writes it, every option settled
    file.write_text(json.dumps({"data": "nowhere.npz", "epsilon": 3.0, "noise_multiplier": None}))
    done = CliRunner().invoke(app, [command, "--config", str(file), "--set", "noise_multiplier=2", "--out", str(tmp_path / "run")])
    assert "nowhere.npz" in done.stderr
    assert "exclude" not in done.stderr
