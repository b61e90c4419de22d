"""What a prior is worth: the same trials for both starts, and a table of the rates that are best for each."""

from __future__ import annotations

import json
import sys

from tests.scripts import script

prior = script("prior")


def test_both_starts_get_the_same_trials_and_a_second_call_trains_nothing(tmp_path, monkeypatch, capsys):
    out = tmp_path / "prior.json"
    given = ["prior.py", "--data", "digits", "--epsilon", "3", "--seeds", "1", "--steps", "1", "--priors", str(tmp_path / "p")]
    monkeypatch.setattr(sys, "argv", [*given, "--out", str(out)])
    prior.main()
    rows = json.loads(out.read_text())["runs"]
    assert {(r["start"], r["rate"]) for r in rows} == {(s, k) for s in ("fresh", "prior") for k in (1.0, 0.5, 0.25)}
    assert all(r["epsilon_pld"] <= 3 for r in rows)
    fresh, begun = ({r["rate"]: r["lr"] for r in rows if r["start"] == s} for s in ("fresh", "prior"))
    assert fresh == begun
    monkeypatch.setattr(prior, "train", lambda *_: 1 / 0)
    prior.main()
    monkeypatch.setattr(sys, "argv", ["prior.py", "--out", str(out), "--table"])
    prior.main()
    assert "| digits | 1,151 | 3 |" in capsys.readouterr().out


def test_the_table_takes_each_start_at_its_best_rate_and_pairs_the_seeds():
    accuracy = {("fresh", 1.0): (0.5, 0.6), ("fresh", 0.5): (0.4, 0.5), ("prior", 1.0): (0.5, 0.5), ("prior", 0.5): (0.7, 0.9)}
    rows = [
        {"data": "d", "epsilon": 1.0, "start": start, "rate": rate, "seed": seed, "accuracy": value, "units": 1000}
        for (start, rate), values in accuracy.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    line = prior.table(rows).splitlines()[-1]
    assert line == "| d | 1,000 | 1 | 55.0 | 1 | 80.0 | 0.5 | +25.0 ± 63.5 | +35.0 ± 63.5 | 2 |"
