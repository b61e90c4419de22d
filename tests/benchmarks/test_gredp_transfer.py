"""The transfer benchmark: tails on features are the network, stored noise is what it says, and a run goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from erlangen.accounting import epsilon, gaussian, poisson
from erlangen.circulant import CirculantConv2d
from erlangen.data.base import Dataset
from erlangen.models import make_model
from tests.scripts import script

bench = script("gredp_transfer")


def images(count: int) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 3, 32, 32)).astype(np.float32), np.arange(count) % 10
    return Dataset("images", x, y, x[:12], y[:12], 10)


@pytest.mark.parametrize("convolutions", [0, 1, 2])
def test_a_tail_on_features_is_the_network(convolutions: int) -> None:
    network, data = bench.public_network(None), images(3)
    tail = make_model("resnet18-tail", (), 10, convolutions=convolutions)
    trained = [n for n, p in tail.named_parameters() if p.requires_grad]
    assert trained == [f"conv{k}.weight" for k in (1, 2)[2 - convolutions :]] + ["head.weight", "head.bias"]
    assert not torch.equal(tail.head.weight, network[-1].weight), "the head starts anew"
    tail.head.load_state_dict(network[-1].state_dict())
    made = bench.features(data.x_train, None, convolutions, "cpu", rows=2)
    torch.testing.assert_close(tail(made), network(torch.from_numpy(data.x_train)), rtol=1e-4, atol=1e-5)


def test_runs_of_one_cell_have_weights_of_their_own() -> None:
    one, other = (make_model("resnet18-tail", (), 10, circulant=4) for _ in range(2))
    assert isinstance(one.conv2, CirculantConv2d)
    with torch.no_grad():
        one.conv2.weight.zero_()
    assert bool(other.conv2.weight.any())


def test_the_head_of_a_run_does_not_depend_on_what_was_made_before() -> None:
    heads = []
    for method in ({"circulant": 4}, {"circulant": 4}, {}, {"convolutions": 2}):
        if not heads:
            bench.public_tail.cache_clear()
            bench.public_network.cache_clear()
        torch.manual_seed(5)
        heads.append(make_model("resnet18-tail", (), 10, **method).head.weight)
    assert all(torch.equal(head, heads[0]) for head in heads), "runs of one seed start from the same weights"


@pytest.mark.parametrize("target", bench.SIGMAS)
def test_stored_noise_is_what_it_says(target: float) -> None:
    for sigma, method in zip(bench.SIGMAS[target], ("pld", "rdp"), strict=True):
        assert 0.996 * target < epsilon([(poisson(0.02, gaussian(sigma)), 1500)], 1e-5, method) <= target  # type: ignore[arg-type]
    for method in ("DP-SGD", "Spectral-DP", "GReDP", "AUTO-S", "DP-SGD, circulant"):
        assert 0.996 * target < bench.true_epsilon(method, target)[0] <= target
    assert bench.true_epsilon("GReDP as published", target)[0] > 1.3 * target, "more than it claims"


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = dict(
        data=folder, out=folder / "out.json", weights="none", convolutions=[0, 1], lengths=[0.01, 0.1], seeds=2, steps=2,
        epsilons=[1.0], tune_steps=1, members=4, budget=1e9, records=None, no_graph=False, device="cpu",
        plain=False,
    )  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def test_trials_then_runs_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "load", lambda name: images(36))
    monkeypatch.setattr(
        bench, "METHODS", {m: bench.METHODS[m] for m in ("DP-SGD", "Spectral-DP", "GReDP as published, circulant")}
    )
    bench.Transfer(options(tmp_path, budget=-1.0)).main()
    assert "out of time" in capsys.readouterr().out
    bench.Transfer(options(tmp_path)).main()
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["tuning"]) == 2 * (1 + 3)
    assert len(result["runs"]) == 2 * (1 + 3)
    assert {row["key"][3] for row in result["runs"]} <= {0.01, 0.1, 1.0}
    capsys.readouterr()
    bench.Transfer(options(tmp_path)).main()
    assert "runs in" not in capsys.readouterr().out, "nothing is trained twice"
    table = bench.table(result)
    assert len(table.splitlines()) == 4 + 4
    assert "| 1Conv | 1 | GReDP as published, circulant | 1.38 / 1.51 |" in table
    with pytest.raises(SystemExit, match="rows with tune_steps = 1, and now it is 2"):
        bench.Transfer(options(tmp_path, tune_steps=2))


def test_plain_runs_have_neither_noise_nor_a_bound_that_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "load", lambda name: images(36))
    for _ in range(2):
        capsys.readouterr()
        bench.Transfer(options(tmp_path, plain=True)).main()
    assert "runs in" not in capsys.readouterr().out, "nothing is trained twice"
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["key"][:2] for row in result["runs"]] == [[k, "no privacy"] for k in (0, 0, 1, 1)]
    assert not result["tuning"]
    config = bench.Run(1, bench.PLAIN, float("inf"), bench.PLAIN_LENGTH, 0).config(None, "cpu", 2, 9)
    assert (config.noise_multiplier, config.lr, config.max_grad_norm) == (0.0, pytest.approx(0.01), 1e6)
    last = bench.table(result).splitlines()[-1]
    assert last.startswith("| 1Conv | ∞ | no privacy | ∞ | 0.1 |")
    assert last.endswith("| – | 80.27 |")


def test_a_table_has_the_runs_of_the_best_length_alone() -> None:
    """More trials on a file may move the best: what was run before is not averaged with what is run now."""
    tuning = [{"key": [0, "DP-SGD", 1.0, length, 1000], "test_accuracy": length} for length in (0.1, 0.3)]
    runs = [
        {"key": [0, "DP-SGD", 1.0, length, seed], "test_accuracy": 1 - length} for length, seed in ((0.3, 0), (0.1, 1))
    ]
    *_, row = bench.table({"public_accuracy": 0.5, "tuning": tuning, "runs": runs}).splitlines()
    assert "| 0.3* | 70.00 (1) |" in row


def test_tuning_never_sees_the_test_set_and_the_best_trial_counts() -> None:
    made = bench.Transfer.__new__(bench.Transfer)
    whole = dataclasses.replace(images(36), x_test=np.full((12, 1), 7.0), x_train=np.zeros((36, 1)))
    made._features = {1: whole}
    held = made.dataset(1, "tuning")
    assert (len(held), len(held.x_test)) == (33, 3)
    assert not (held.x_test == 7.0).any()
    rows = [
        {"key": [1, "GReDP", 1.0, length, 0], "test_accuracy": a} for length, a in ((0.1, 0.5), (0.03, 0.5), (0.3, 0.4))
    ]
    assert bench.best({"tuning": rows}, 1, "GReDP", 1.0) == 0.03
