"""Canaries in a real training run: sound runs pass, a run with too little noise does not; results stay with the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from erlangen.audit import canaries, membership, runs
from erlangen.audit.verdict import CONSISTENT, INCONCLUSIVE, VIOLATED
from erlangen.cli.main import app
from erlangen.training.config import TrainConfig
from erlangen.training.run import train
from erlangen.training.session import Session

CONFIG = TrainConfig(model="logistic", epsilon=None, noise_multiplier=1.0, batch=128, steps=30, ema=0.0, seed=5)


def release_finding(config: TrainConfig, spoil=lambda mechanism: None):
    session = Session(config, run_id="canaries")
    spoil(session.training.mechanism)
    return canaries.audit_run(session, "run", release=60, run=0)[0]


@pytest.mark.parametrize("mechanism", ["iso", "rep", "geodp"])
def test_release_canaries_of_a_sound_run(mechanism):
    found = release_finding(TrainConfig(**{**CONFIG.__dict__, "mechanism": mechanism}))
    assert found.verdict == CONSISTENT
    assert found.gdp_lower_bound["95%"] < found.claim
    if mechanism == "iso":  # the attack is nearly tight where the release is the noised sum
        assert found.gdp_lower_bound["95%"] > 0.6 * found.claim
        assert 0.9 < found.facts["noise_upper_limit"] < 1.15


def test_release_canaries_find_half_the_noise():
    def spoil(mechanism):
        honest = mechanism.noise.perturb
        mechanism.noise.perturb = lambda value, std: honest(value, std * 0.5)

    assert release_finding(CONFIG, spoil).verdict == VIOLATED


def test_canaries_leave_the_run_as_it_was():
    session = Session(CONFIG, run_id="a")
    tap = canaries.CanaryTap(session.training.mechanism, 0.1, 5, 5)
    session.step()
    tap.remove()
    assert "finish" not in session.training.mechanism.__dict__
    session.step()
    assert session.accountant.steps == 2
    assert tap.places.unique().numel() == tap.places.numel()


@pytest.mark.slow
def test_run_canaries_bound_the_whole_run():
    session = Session(TrainConfig(**{**CONFIG.__dict__, "noise_multiplier": 0.7}), run_id="whole")
    release, noise, run, one = canaries.audit_run(session, "run", release=20, run=500)
    assert VIOLATED not in {release.verdict, noise.verdict, run.verdict, one.verdict}
    assert 0.3 * run.claim < run.gdp_lower_bound["95%"] < run.claim
    assert 0 < one.lower_bound["95%"] < one.claim


def memorise(x, y):
    """Not private at all: the model is the training set."""
    table = {tuple(row.flatten().tolist()): int(label) for row, label in zip(x, y)}

    def model(inputs):
        logits = torch.zeros(len(inputs), 10)
        for k, row in enumerate(inputs):
            label = table.get(tuple(row.flatten().tolist()))
            if label is not None:
                logits[k, label] = 5.0
        return logits

    return model


def constant(x, y):
    """Perfectly private: the data is not looked at."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_membership_of_a_users_own_training_function():
    from erlangen.data import load

    data = load("digits")
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    ask = lambda f: membership.audit_training_function(f, x, y, classes=10, epsilon=1.0, delta=1e-5, guesses=100)  # noqa: E731
    assert ask(memorise).verdict == VIOLATED
    found = ask(constant)
    assert found.verdict == CONSISTENT
    assert abs(found.facts["advantage"]) < 0.15
    unasked = lambda f, e: membership.audit_training_function(f, x, y, classes=10, epsilon=e, delta=1e-5)  # noqa: E731
    for claim in (1.0, 3.0):
        assert unasked(memorise, claim).verdict == VIOLATED, "as many guesses as it takes, without being told"
        assert unasked(constant, claim).verdict == CONSISTENT
    found = unasked(memorise, 8.0)
    assert found.verdict == INCONCLUSIVE
    assert "--records" in found.reason


def test_planted_canaries_are_mislabelled_and_counted_once():
    x, y = torch.randn(50, 3), torch.arange(50) % 5
    planted = membership.plant(x, y, 5, 20, seed=1)
    assert len(planted.x) == 30 + planted.included.sum()
    origin = {tuple(r.tolist()): int(label) for r, label in zip(x, y)}
    assert all(origin[tuple(r.tolist())] != int(w) for r, w in zip(planted.canary_x, planted.canary_y))
    with pytest.raises(ValueError, match="do not fit"):
        membership.plant(x, y, 5, 50)


def test_advantage_is_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 60), rng.normal(0, 1, 80)
    want = (a[:, None] > b[None]).mean() - 0.5
    assert membership.advantage(a, b) == pytest.approx(want)


def test_membership_reads_the_data_as_the_run_did(tmp_path):
    from PIL import Image

    for name in ("a/p1_0.png", "a/p2_0.png", "b/p1_1.png", "b/p3_0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    config = TrainConfig(data=str(tmp_path), unit="patient", data_options={"unit_pattern": "^(p[0-9]+)_"})
    with pytest.raises(ValueError, match="unit of privacy is a group"):
        membership.audit_session(config, "run")


def test_run_command_stores_its_findings_with_the_run(tmp_path):
    folder = tmp_path / "run"
    train(TrainConfig(**{**CONFIG.__dict__, "steps": 6}), folder)
    args = ["audit", "run", str(folder), "--canaries", "0", "--records", "40", "--json"]
    result = CliRunner().invoke(app, args)
    found = json.loads(result.stdout)
    assert result.exit_code in (0, 3), result.output
    assert {f["audit"] for f in found["findings"]} == {"release canaries", "noise along canaries", "membership"}
    assert json.loads((folder / "audit.json").read_text())["verdict"] == found["verdict"]
    from erlangen.accounting import certificate, verify

    assert found["verdict"] in certificate.load(folder / "certificate.json")["audit"]
    assert "release canaries ε ≥" in (folder / "certificate.md").read_text()
    assert verify(folder / "certificate.json") == []
    shown = runs.stored(folder)
    assert shown is not None
    assert shown["verdict"] == found["verdict"]
    assert runs.stored(tmp_path) is None


def test_run_command_on_a_function():
    ask = ["audit", "run", f"{__name__}:memorise", "--claim-epsilon", "1", "--json"]
    result = CliRunner().invoke(app, ask)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "violated"


def test_run_command_names_a_folder_without_a_run(tmp_path):
    result = CliRunner().invoke(app, ["audit", "run", str(tmp_path)])
    assert result.exit_code == 2
    assert "no config.json" in result.output
