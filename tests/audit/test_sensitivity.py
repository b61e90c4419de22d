"""`erlangen audit sensitivity`: consistent on our bounds, violated by a wrong one, inconclusive without teeth."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from erlangen.audit import sensitivity
from erlangen.audit.examples import bounded_examples
from erlangen.cli.main import app
from erlangen.lipschitz import Flatten, MaxMin, SpectralDense

QUICK = {"steps": 3, "restarts": 1, "layer_steps": 15}


@pytest.fixture(scope="module")
def found():
    every = bounded_examples()
    few = {kind: every[kind] for kind in (SpectralDense, MaxMin, Flatten)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "bounded_examples", lambda: few)
        return sensitivity.audit_sensitivity(train_steps=3, names=["mixer"], **QUICK)


def test_our_bounds_hold_and_the_search_has_teeth(found):
    assert found["verdict"] == "consistent"
    assert found["worst"] <= 1.0
    assert found["control"]["refuted"]
    assert {"MaxMin", "Flatten"} <= set(found["tight_layers"])
    assert {row["subject"] for row in found["losses"]} == {
        "CrossEntropy",
        "KCosine",
        "MulticlassHinge",
        "HingeKR",
        "MAE",
    }
    assert [row["subject"] for row in found["networks"]] == ["mixer"]
    json.dumps(found, allow_nan=False)


def test_a_wrong_bound_of_a_layer_is_a_violation(monkeypatch):
    monkeypatch.setattr(SpectralDense, "parameter_bound", lambda self, x, g: {"weight": 0.8 * g * x.norm})
    monkeypatch.setattr(sensitivity, "bounded_examples", lambda: {SpectralDense: (lambda: SpectralDense(5, 4), (5,))})
    wrong = sensitivity.audit_layers(steps=6)
    assert [row["subject"] for row in wrong if not row["passed"]] == ["SpectralDense"]
    monkeypatch.setattr(sensitivity, "audit_losses", lambda seed: [])
    assert sensitivity.audit_sensitivity(names=[])["verdict"] == "violated"


def test_a_search_without_teeth_decides_nothing(monkeypatch):
    monkeypatch.setattr(sensitivity, "control", lambda seed: {"refuted": False, "error": None})
    monkeypatch.setattr(sensitivity, "audit_losses", lambda seed: [])
    monkeypatch.setattr(sensitivity, "audit_layers", lambda seed, steps: [])
    assert sensitivity.audit_sensitivity(names=[])["verdict"] == "inconclusive"


def test_the_command(monkeypatch, found):
    monkeypatch.setattr(sensitivity, "audit_sensitivity", lambda *args, **options: found)
    run = CliRunner().invoke(app, ["audit", "sensitivity", "clipless", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["verdict"] == "consistent"
    assert "refuted" in CliRunner().invoke(app, ["audit", "sensitivity"]).stdout
    assert CliRunner().invoke(app, ["audit", "sensitivity", "iso"]).exit_code == 2
