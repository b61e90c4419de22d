"""Code of one's own is known by name to every command, in child processes too, and never because a run's folder says so."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from erlangen import plugins
from erlangen.cli.main import app
from erlangen.cli.manners import plugins_first
from erlangen.experiments.pool import Pool
from erlangen.mechanisms import base

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-mechanism.md"

HALF = """
class HalfTheNoise(GaussianMechanism):
    def finish(self, expected_batch):
        self.noise_multiplier, sigma = self.noise_multiplier / 2, self.noise_multiplier
        try:
            return super().finish(expected_batch)
        finally:
            self.noise_multiplier = sigma


@register_mechanism("half")
def half(context):
    return HalfTheNoise(context.noise_multiplier, context.clipping, Hartley(1.0), context.noise, name="half")
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The mechanism of the docs in a file of its own, in a process that has not seen it."""
    monkeypatch.setattr(base, "_MECHANISMS", dict(base._MECHANISMS))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hartley.py"
    path.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0] + HALF)
    return path


def invoke(*words):
    done = CliRunner().invoke(app, list(words))
    return done, json.loads(done.stdout) if "--json" in words else None


def test_the_docs_mechanism_trains_by_name_and_its_run_needs_the_plugin_again(page, monkeypatch):
    run = ("--mechanism", "hartley", "--model", "logistic", "--steps", "2", "--noise-multiplier", "1")
    done, _ = invoke("train", "--plugin", "hartley.py", *run, "--out", "run", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads((Path("run") / "certificate.json").read_text())["mechanism"]["name"] == "hartley"
    monkeypatch.setattr(base, "_MECHANISMS", {k: v for k, v in base._MECHANISMS.items() if k != "hartley"})
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert "plugin" not in (Path("run") / "config.json").read_text()  # opening a folder runs nobody's code
    refused, _ = invoke("train", *run, "--out", "other", "--json")
    assert refused.exit_code == 2
    assert "--plugin FILE" in refused.stderr


def test_the_static_audit_passes_the_docs_mechanism_and_catches_its_broken_twin(page):
    sound, findings = invoke("audit", "static", "--plugin", str(page), "--only", "hartley", "--json")
    assert sound.exit_code == 0, findings
    assert {f["audit"] for f in findings["findings"]} == {"flow", "covariance", "energy", "training step", "session"}
    broken, findings = invoke("audit", "static", "--plugin", str(page), "--only", "half", "--json")
    assert broken.exit_code == 1
    assert {f["verdict"] for f in findings["findings"]} == {"violated"}


def test_child_processes_have_it_wherever_they_start(page, tmp_path):
    code = "from erlangen import mechanisms, plugins; plugins.load(); print('hartley' in mechanisms.mechanisms())"
    plugins.add(["hartley.py"])
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def known(name):
    return name in base.mechanisms()


def test_the_processes_of_a_comparison_have_it_too(page):
    plugins.add(["hartley.py"])
    assert dict(Pool(workers=2).run(known, ["hartley", "iso", "nothing"])) == {"hartley": True, "iso": True, "nothing": False}


def test_installed_packages_bring_theirs(page, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("mine", "hartley", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == plugins.GROUP else [])
    plugins.load()
    assert "hartley" in base.mechanisms()
    sys.modules.pop("hartley")


def test_a_plugin_that_fails_says_what_failed(page):
    Path("bad.py").write_text("raise KeyError('colour')")
    with pytest.raises(plugins.PluginError, match=r"bad\.py cannot be imported: KeyError: 'colour'"):
        plugins.load([str(Path("bad.py").resolve())])
    assert "erlangen_plugin_bad" not in sys.modules


def test_it_may_stand_anywhere_before_two_dashes():
    assert plugins_first(["train", "--plugin", "a.py", "--json"]) == ["--plugin", "a.py", "train", "--json"]
    assert plugins_first(["--plugin=b", "train", "--", "--plugin", "c"]) == ["--plugin=b", "train", "--", "--plugin", "c"]
