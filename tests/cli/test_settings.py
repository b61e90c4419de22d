"""``--set``: JSON, words, and single entries of objects, in order, above the file's."""

from __future__ import annotations

import json

import pytest
import typer

from erlangen.cli.settings import assigned, assignment
from erlangen.cli.train import _settings


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
    config = _settings(file, {"lr": 0.3}, ["mechanism_options.a=1", "model_options.depth=3", "noise_multiplier=1.5"])
    assert config.model_options == {"width": 8, "depth": 3}
    assert config.mechanism_options == {"a": 1}
    assert (config.epsilon, config.noise_multiplier, config.momentum, config.lr) == (None, 1.5, 0.1, 0.3)
