"""The script that measures what each metric adds: against the two figures worked out by hand, and end to end."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from erlangen.mechanisms.rep import normalised
from tests.scripts import script

balance = script("balance")


def test_figures_are_those_of_one_coordinate_after_another():
    rows, m = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([1.0, 2.0])
    lengths = [(9 + 4) ** 0.5, 1.0]
    mean = [(3 / lengths[0] + 0) / 2, (4 / lengths[0] + 2) / 2]
    energy, ratio = balance.figures(rows, m)
    assert energy == pytest.approx(5 * (lengths[0] ** 2 + 1) / 2)
    assert ratio == pytest.approx((mean[0] ** 2 + mean[1] ** 2) / 5)


def test_own_scales_whiten_for_nothing_and_their_roots_are_the_best():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 3))
    rows = balance.gradients(module, torch.rand(12, 1, 8, 8), torch.arange(12) % 3)
    found = {name: balance.figures(rows, m)[0] for name, m in balance.metrics(module, (1, 8, 8), rows).items()}
    iso = balance.figures(rows, torch.ones(rows.shape[1]))[0]
    assert found["own scales"] == pytest.approx(iso, rel=1e-4)
    assert found["own scales^0.5"] < iso
    sizes = [p.numel() for p in module.parameters()]
    for seed in range(20):  # no other choice of one scale for each parameter has less
        drawn = torch.randn(len(sizes), generator=torch.Generator().manual_seed(seed)).exp()
        m = torch.cat([scale.expand(size) for scale, size in zip(drawn, sizes, strict=True)])
        assert balance.figures(rows, m)[0] >= found["own scales^0.5"] * (1 - 1e-5)
    assert normalised({"a": torch.tensor([2.0, 8.0])})["a"].log().sum() == pytest.approx(0.0, abs=1e-6)


def test_it_runs_along_private_training(tmp_path, monkeypatch, capsys):
    out = tmp_path / "balance.json"
    monkeypatch.setattr(sys, "argv", [
        "balance.py", "--dataset", "rotated_digits", "--model", "c8-tiny", "--model-options", "{}", "--looks", "0,2",
        "--records", "8",
        "--out", str(out),
    ])  # fmt: skip
    balance.main()
    found = json.loads(out.read_text())
    assert set(found["steps"]) == {"0", "2"}
    assert found["steps"]["0"]["balanced"]["noise_energy"] < 1
    assert found["steps"]["0"] != found["steps"]["2"]
    assert "own scales" in capsys.readouterr().out
