"""The demo of the Makefile: a private equivariant model on rotated digits."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from erlangen.cli.main import app

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def demo(folder: Path, **changes: str) -> dict:
    """Run the recipe, with the options in ``changes`` replaced."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.M)
    assert recipe is not None
    words = shlex.split(recipe[1].replace("\\\n", " "))[1:]
    for option, value in {"out": str(folder), **changes}.items():
        words[words.index(f"--{option}") + 1] = value
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_the_demo_is_an_equivariant_model_with_rep(tmp_path: Path) -> None:
    summary = demo(tmp_path / "demo", steps="2")
    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    assert (config["model"], config["data"], config["mechanism"]) == ("c8-tiny", "rotated_digits", "rep")
    assert summary["guarantee"]["mechanism"]["metric"] == "escnn"
    assert summary["guarantee"]["epsilon"]["pld"] <= 3


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path) -> None:
    summary = demo(tmp_path / "demo")
    assert summary["test"]["test_accuracy"] > 0.8
    assert {"brier", "ece"} <= set(summary["test"])
    assert 0 <= summary["small_parameters"] <= 1
