"""Several runs together: seeds are averaged, methods compared, what cannot be compared is said."""

from __future__ import annotations

import dataclasses
import statistics

from erlangen.accounting.certificate_beside import Validation
from erlangen.report import overview, read, render
from erlangen.report.page import build, in_detail


def several(trained):
    """Two methods, two noise levels, three seeds each, with made-up accuracies and ε."""
    base, runs = read(trained), []
    for mechanism, bonus in (("iso", 0.0), ("rep", 0.05)):
        for epsilon, level in ((1.0, 0.6), (4.0, 0.8)):
            for seed in range(3):
                config = dataclasses.replace(base.config, mechanism=mechanism, noise_multiplier=4 / epsilon, seed=seed)
                summary = {
                    **base.summary,
                    "test": {"test_accuracy": level + bonus + 0.01 * seed},
                    "guarantee": {**base.guarantee, "epsilon": {"pld": epsilon, "rdp": epsilon}},
                }
                runs.append(dataclasses.replace(base, config=config, summary=summary, certificate=None))
    return runs


def test_points_are_means_over_seeds_with_their_spread(trained):
    chart = overview.accuracy_against_epsilon(several(trained))
    iso, rep, front = chart.series
    assert (iso.name, rep.name) == ("iso", "rep")
    assert iso.x == (1.0, 4.0)
    assert abs(iso.y[0] - 0.61) < 1e-9
    assert abs(iso.high[0] - iso.y[0] - statistics.stdev([0.6, 0.61, 0.62])) < 1e-9
    assert front.y == rep.y
    assert "3 run(s)" in iso.notes


def test_a_front_of_one_point_is_no_line(trained):
    """The legend and the caption spoke of a dashed line that nobody could see."""
    runs = [
        dataclasses.replace(run, summary={**run.summary, "test": {"test_accuracy": 0.9}})
        if run.config.mechanism == "iso" and run.summary["guarantee"]["epsilon"]["pld"] == 1.0
        else run
        for run in several(trained)
    ]
    chart = overview.accuracy_against_epsilon(runs)
    assert [s.name for s in chart.series] == ["iso", "rep"]
    assert "dashed" not in chart.caption
    assert "more private or more accurate than iso at ε = 1." in chart.caption


def test_settings_without_a_guarantee_are_not_on_the_front(trained):
    runs = several(trained)
    last = {**runs[-1].summary, "test": {"test_accuracy": 1.0}}
    last["guarantee"] = {**last["guarantee"], "epsilon": {"pld": "inf", "rdp": "inf"}}
    free = dataclasses.replace(
        runs[-1], summary=last, config=dataclasses.replace(runs[-1].config, noise_multiplier=0.0)
    )
    chart = overview.accuracy_against_epsilon([*runs, free])
    assert max(max(s.y) for s in chart.series) < 0.9
    assert "1 setting(s) without a guarantee" in chart.caption


def test_what_differs_is_said(trained):
    runs = several(trained)
    assert overview.comparability(runs) == []
    other = {**runs[0].summary, "data": {**runs[0].summary["data"], "fingerprint": "another"}}
    words = overview.comparability([dataclasses.replace(runs[0], summary=other), runs[1]])
    assert any("different private data" in word for word in words)


def test_runs_on_the_same_records_have_spent_more_together(trained):
    """The page put six runs on one data set side by side, each with its ε, and none of the words was of their sum."""
    runs = several(trained)
    words = f"{len(runs)} of these runs were trained on records that another was trained on, too"
    assert words in build(runs).warnings[0]
    assert words in render(build(runs))
    other = {**runs[0].summary, "data": {**runs[0].summary["data"], "fingerprint": "another"}}
    assert overview.together([dataclasses.replace(runs[0], summary=other), runs[1]]) == []
    assert overview.together([dataclasses.replace(run, note="the table says it") for run in runs]) == []


def test_a_page_does_not_call_private_what_is_not(trained):
    """"6 private runs" stood above runs with ε = ∞."""
    run = read(trained)
    none = dataclasses.replace(run, problems=("edited",))
    assert "<h1>2 runs</h1>" in render(build([run, none]))


def test_one_of_each_method_is_shown_first(trained):
    runs = several(trained)
    assert in_detail(runs, 2) == [0, 6]
    assert in_detail(runs, 4) == [0, 3, 6, 9]
    assert len(build(runs, 1).pages) == 1


def test_what_validation_cost_is_said_to_be_left_out(trained):
    runs = several(trained)
    assert "validation" not in overview.accuracy_against_epsilon(runs).caption
    beside = Validation(9.0, True, "two releases more")
    chart = overview.accuracy_against_epsilon([dataclasses.replace(runs[0], validation=beside), *runs[1:]])
    assert "What private validation cost beside 1 of the runs is not in it." in chart.caption
