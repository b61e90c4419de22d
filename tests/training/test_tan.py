"""Dry runs: same noise per record, true cost, and predictions that agree with what they predict."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
import torch

from erlangen import RowMap
from erlangen.accounting import compose_runs, epsilon
from erlangen.accounting.words import upper
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.run import train
from erlangen.training.session import Session
from erlangen.training.tan import SAFE, dry_run, plan

LARGE = TrainConfig(model="mlp", model_options={"width": 32}, epsilon=3.0, batch=256, steps=60, lr=0.5, ema=0.9, evaluations=1)


def test_the_noise_on_the_mean_gradient_stays_and_the_cost_does_not():
    made = plan(LARGE, 8)
    assert made.small.batch == 32
    large, small = (Session(c) for c in (made.target, made.small))
    std = lambda s: s.training.mechanism.std / s.sampler.expected_batch  # noqa: E731
    assert std(small) == pytest.approx(std(large), rel=1e-12)
    assert small.config.steps == large.config.steps
    assert made.target_epsilon == pytest.approx(3.0, rel=0.01)
    assert made.small_epsilon > 4 * made.target_epsilon
    d = sum(p.numel() for p in large.model.parameters())
    sigma = large.training.mechanism.noise_multiplier
    assert made.dominance == pytest.approx(d * sigma**2 / (8 * 256))
    assert "not the private run" in made.remarks[0]
    assert f"each one costs ε = {upper(made.small_epsilon, 3)} by itself" in made.remarks[0]  # never less than it is


def test_a_dry_run_takes_no_constants_that_nobody_counts():
    """A plan holds the settled configuration and ends up in tan.json: released constants in it would be free."""
    with pytest.raises(ConfigError, match="normalise is 'private'"):
        plan(dataclasses.replace(LARGE, data_options={"normalise": "private"}), 8)


def test_dominance_bounds_the_share_of_sampling_error():
    """Measured: the variance of the small batch's mean is at most k·C²/B, and the noise's is d·σ²C²/B²."""
    made = plan(LARGE, 8)
    quiet = Session(dataclasses.replace(made.small, noise_multiplier=0.0, seed=0))
    means = []
    for _ in range(60):
        rows = quiet.sampler.draw()
        quiet.training.announce(RowMap.regular(len(rows)))
        torch.nn.functional.cross_entropy(quiet.model(quiet.x[rows]), quiet.y[rows]).backward()
        quiet.training.take()
        means.append(torch.cat([p.grad.flatten() for p in quiet.model.parameters()]))
    sampling = float(torch.stack(means).var(0).sum())
    assert sampling <= 8 / 256 * 1.2
    noise = sum(p.numel() for p in quiet.model.parameters()) * made.noise_to_batch**2
    assert noise / sampling > made.dominance / 1.2


def test_a_dry_run_is_a_run_with_a_ledger_of_its_own(tmp_path):
    config = dataclasses.replace(LARGE, steps=5, epsilon=None, noise_multiplier=1.0)
    result = dry_run(config, 4, (0, 1), tmp_path / "tan")
    saved = json.loads((tmp_path / "tan" / "tan.json").read_text())
    assert saved["predicted_accuracy"] == result.mean == statistics.fmean(result.accuracies)
    folders = [tmp_path / "tan" / f"dry-run-{k}" for k in range(2)]
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert summary["guarantee"]["epsilon"]["pld"] == pytest.approx(result.plan.small_epsilon, rel=1e-6)
    (group,) = compose_runs(folders)
    delta = result.plan.target.delta
    assert delta is not None
    assert epsilon(group.pairs(), delta) > result.plan.small_epsilon > result.plan.target_epsilon


@pytest.mark.parametrize(
    ("changes", "k", "match"),
    [({}, 1, "above 1"), ({}, math.inf, "above 1"), ({}, 1000, "batch"), ({"epsilon": None, "noise_multiplier": 0.0}, 4, "is 0")],
)
def test_what_cannot_be_predicted_is_refused(changes, k, match):
    with pytest.raises(ConfigError, match=match):
        plan(dataclasses.replace(LARGE, **changes), k)


def test_too_large_a_k_is_said():
    made = plan(dataclasses.replace(LARGE, epsilon=None, noise_multiplier=0.5), 64)
    assert made.dominance < SAFE
    assert "use k ≤" in made.remarks[1]


@pytest.mark.slow
def test_prediction_and_real_run_agree_within_their_spread():
    seeds = range(5)
    predicted = dry_run(LARGE, 8, seeds)
    real = [train(dataclasses.replace(LARGE, seed=s)).summary["test"]["test_accuracy"] for s in seeds]
    spread = math.hypot(predicted.spread, statistics.stdev(real))
    assert abs(predicted.mean - statistics.fmean(real)) <= 2 * spread + 0.01


def test_the_command_says_that_it_is_not_private(capsys):
    from erlangen.cli.main import app

    options = ["model=mlp", "epsilon=null", "noise_multiplier=2.0", "batch=128", "steps=2", "evaluations=1"]
    arguments = ["tan", "-k", "4", "--seeds", "1", *[part for text in options for part in ("--set", text)]]
    with pytest.raises(SystemExit) as ended:
        app([*arguments, "--json"])
    assert ended.value.code in (0, None)
    said = json.loads(capsys.readouterr().out)
    assert said["small"]["batch"] == 32
    assert said["noise_to_batch"] == pytest.approx(2.0 / 128)
    assert "not the private run" in said["remarks"][0]
    with pytest.raises(SystemExit):
        app(arguments)
    printed = capsys.readouterr().out
    assert "not the private run" in printed
    assert f"Dominance     {said['dominance']:.3g} " in printed
