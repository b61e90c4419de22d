"""The page on priors follows from its runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

from tests.scripts import script

ROOT = Path(__file__).parents[2]
prior = script("prior")


def runs() -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / "prior.json").read_text())["runs"]


def page() -> str:
    return (ROOT / "docs" / "results" / "prior.md").read_text()


def test_the_table_is_that_of_the_runs():
    for line in prior.table(runs()).splitlines():
        assert line in page()


def test_both_starts_had_the_same_trials_and_the_epsilon_that_is_said():
    found = prior.by_rate(runs())
    for starts in found.values():
        if set(starts) == set(prior.STARTS):
            grids = [{(rate, seed) for rate, seeds in rates.items() for seed in seeds} for rates in starts.values()]
            assert grids[0] == grids[1]
    assert all(row["epsilon_pld"] <= row["epsilon"] for row in runs())


def test_what_the_page_says_of_the_gains():
    found = {key: starts for key, starts in prior.by_rate(runs()).items() if set(starts) == set(prior.STARTS)}
    own = {key: mean(prior.gains(starts, {s: prior.best(r) for s, r in starts.items()})) for key, starts in found.items()}
    assert all(value > 0 for value in own.values()), "the page says: in every one of them"
    assert len(own) == 10


def test_the_readme_says_what_the_table_says():
    found = re.search(r"[+-][0-9.]+ ± [0-9.]+", prior.table(runs()).splitlines()[-1])
    assert found is not None
    assert f"| {found[0]} points, mean of ten" in (ROOT / "README.md").read_text()
