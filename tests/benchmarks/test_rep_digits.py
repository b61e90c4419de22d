"""The small case runs from trials to paired runs, with the rate that was best on held-out images."""

from __future__ import annotations

import json
import sys

from tests.scripts import script

digits = script("rep_digits")


def test_rates_are_chosen_on_held_out_images_and_runs_are_paired(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(digits, "RATES", (0.5, 2.0))
    monkeypatch.setattr(digits, "METHODS", {name: digits.METHODS[name] for name in ("iso", "rep:balanced")})
    out = tmp_path / "digits.json"
    monkeypatch.setattr(sys, "argv", ["rep_digits.py", "--seeds", "2", "--steps", "2", "--out", str(out)])
    digits.main()
    found = json.loads(out.read_text())
    assert len(found["tuning"]) == 2 * 2 * 2
    assert [(r["mechanism"], r["seed"]) for r in found["runs"]] == [(m, s) for s in range(2) for m in digits.METHODS]
    for method in digits.METHODS:
        mean = {
            lr: sum(r["test_accuracy"] for r in found["tuning"] if (r["mechanism"], r["lr"]) == (method, lr)) for lr in digits.RATES
        }
        assert {r["lr"] for r in found["runs"] if r["mechanism"] == method} == {max(mean, key=lambda lr: mean[lr])}
    assert "over 2 seeds" in capsys.readouterr().out


def test_held_out_images_are_not_trained_on():
    data = digits.load("rotated_digits")
    part = digits.split(data, digits.HELD_OUT)
    assert len(part) == len(data) - digits.HELD_OUT
    seen = {row.tobytes() for row in part.x_train}
    assert sum(row.tobytes() in seen for row in part.x_test) == 0
