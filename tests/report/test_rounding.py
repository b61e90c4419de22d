"""What a reader sees of a bound is never less than the bound, wherever it stands."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from erlangen.report import build, charts, comparison, overview, read, render
from erlangen.report.chart import Axis, Chart, Series, number, small
from erlangen.report.folder import Run
from erlangen.report.interactive import figure
from erlangen.ui import views
from erlangen.ui.runs import Seen

#: nearest in three digits 2.99, in four 2.991: both promise too much
EPSILON, TOO_LITTLE = 2.99125, re.compile(r"(?<![\d.])2\.99[01]?(?![\d])")
#: nearest in two digits 1.2
DELTA, TOO_SMALL = 1.234e-5, re.compile(r"(?<![\d.])1\.2(?:·10⁻⁵|e-0?5)")


def awkward(run: Run, seed: int = 0) -> Run:
    """The run with an ε and a δ that are nearest to something smaller, wherever they are kept."""
    assert run.certificate is not None
    best = {**run.certificate["guarantee"], "best_epsilon": EPSILON, "epsilon": {"pld": EPSILON, "rdp": EPSILON}}
    told = {**run.guarantee, "epsilon": {"pld": EPSILON, "rdp": EPSILON}, "delta": DELTA}
    history = tuple({**row, "epsilon": EPSILON} for row in run.history)
    finding = {**(run.audit or {})["findings"][0], "claim": EPSILON, "lower_bound": 0.4567, "gdp_lower_bound": 0.45678}
    return dataclasses.replace(
        run,
        config=dataclasses.replace(run.config, seed=seed, noise_multiplier=1.0 + seed),
        certificate={**run.certificate, "guarantee": best, "delta": DELTA},
        summary={**run.summary, "guarantee": told},
        history=history,
        audit={"verdict": "consistent", "findings": [finding]},
    )


@pytest.fixture(scope="module")
def runs(trained):
    return [awkward(read(trained), seed) for seed in (0, 1)]


@pytest.mark.parametrize("count", [1, 2])
def test_no_page_says_less_than_epsilon_or_delta(runs, count):
    report = build(runs[:count])
    page = render(report).split("<script>", 1)[0]
    tables = json.dumps([f.table() for f in report.figures().values()], ensure_ascii=False)
    paper = json.dumps([(f.caption, f.alt) for f in report.figures().values()], ensure_ascii=False)
    for text in (page, tables, paper):
        assert not TOO_LITTLE.findall(text)
        assert not TOO_SMALL.findall(text)
    assert "2.992" in page
    assert "1.3·10⁻⁵" in page
    assert "at least 0.4567 shown" in page
    assert "ε ≥ 0.456<" in page.replace("\n", ""), "what an attack has shown is rounded down"
    if count == 2:
        assert [row[2:4] for row in overview.table(runs)[1]] == [["2.992", "1.3·10⁻⁵"]] * 2


def test_nor_does_the_local_page(runs):
    seen = [Seen(f"run {k}", "finished", r.config, r.history, r.epsilon, r.delta, r.accuracy, run=r) for k, r in enumerate(runs)]
    for found in (views.detail(seen[0]), views.comparison(seen)):
        shown = json.dumps({k: v for k, v in found.items() if k != "rows"}, ensure_ascii=False)
        assert not TOO_LITTLE.findall(shown)
        assert not TOO_SMALL.findall(shown)
        assert "2.992" in shown


def test_hits_are_never_fewer_than_an_attack_can_have(trained):
    """In the table, under the mouse, and in words: as the privacy statement has them."""
    chart = charts.attacker(read(trained))
    [best] = [s for s in chart.series if s.name == "the best possible attack"]
    shown = [float(row[2].removesuffix(" %")) for row in chart.table()[1] if row[0] == best.name]
    hovers = [float(re.search(r"hits: ([\d.]+) %", h).group(1)) for h in figure(chart)["data"][0]["hovertext"]]
    for said in (shown, hovers, [float(x) for x in re.findall(r"more than ([\d.]+) %", chart.alt)]):
        assert len(said) > 1
        exact = best.y if len(said) > 2 else [best.y[1], best.y[4]]
        assert all(100 * y <= s < 100 * y + 0.1 for y, s in zip(exact, said))
    assert any(round(100 * y, 1) < s for y, s in zip(best.y, shown)), "the nearest would be less somewhere"


def test_bounds_of_every_kind_of_axis():
    values = np.random.default_rng(0).uniform(0, 1, 200)
    for value in values:
        assert float(number(value, Axis("ε", bound="upper"))) >= value
        assert float(number(value, Axis("radius", bound="lower"))) <= value
        assert float(number(value, Axis("ε", bound="upper"), "lower")) <= value
        assert float(number(value, Axis("hits", percent=True, bound="upper")).removesuffix(" %")) >= 100 * value
    plain = [float(number(v, Axis("accuracy"))) for v in values]
    assert any(p < v for p, v in zip(plain, values)), "the broken twin: to the nearest"
    assert small(0.012345) == "0.01235"
    assert number(float("inf"), Axis("ε", bound="upper")) == "∞"
    assert number(0.053, Axis("hits", percent=True, bound="upper")) == "5.3 %"
    chart = Chart("k", "t", "c", "a", Axis("x"), Axis("ε", bound="upper"), (Series("shown", (0.0,), (0.45678,), bound="lower"),))
    assert chart.table()[1][0][2] == "0.4567"


def test_a_comparison_names_its_target():
    row = {"mechanism": "iso", "model": "cnn", "target_epsilon": 2.00004, "mean": 0.5, "std": None}
    result = {"mechanisms": ["iso"], "rows": [row], "data": {"name": "d"}, "seeds": 1, "covers": "", "epsilons": [2.00004]}
    assert "ε = 2.001" in comparison.chart(result).alt
