"""Sessions under attack: options are combined pairwise, sound sessions pass, and nothing that is kept escapes the comparison."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from erlangen.audit import sessions
from erlangen.audit.sessions import (
    attacked,
    audit_sessions,
    combined,
    crowd,
    difference,
    factors,
    records,
    without_last,
)
from erlangen.audit.verdict import CONSISTENT, INCONCLUSIVE


def test_every_two_options_stand_together_somewhere():
    every = factors()
    rows = combined(every)
    assert len(rows) < 40
    for (_, first), (_, second) in combinations(every.items(), 2):
        for a in first:
            for b in second:
                assert any({**row, **a, **b} == row for row in rows), (a, b)


def test_every_clipping_rule_is_among_them():
    from erlangen.mechanisms.clipping import clipping_rules

    assert {row["clipping"] for row in combined(factors())} == set(clipping_rules())


def test_plain_training_is_sound():
    found = audit_sessions("iso", 0, {"mechanism": "iso"})
    assert found.verdict == CONSISTENT, found.reason
    assert found.facts["sensitivity"] == pytest.approx(1.0, abs=1e-3)  # and the attack is not idle


def test_neighbours_differ_by_one_unit():
    data = records(torch.zeros(1, 8, 8), 6)
    assert len(without_last(data, unit=True)) == len(data) - sessions.IMAGES_EACH
    assert len(without_last(data, unit=False)) == len(data) - 1
    assert len(crowd(7)) == 7


def test_the_first_difference_of_two_states_is_named():
    a = {"model": {"w": torch.tensor([1.0, math.nan])}, "steps": [1, 2]}
    same = {"model": {"w": torch.tensor([1.0, math.nan])}, "steps": [1, 2]}
    assert difference(a, same) is None
    assert difference(a, {**same, "steps": [1, 3]}) == "steps.1"
    assert difference(a, {**same, "model": {"w": torch.tensor([1.0, 0.0])}}) == "model.w"
    assert difference(a, {"model": same["model"]}) is not None


def test_what_no_combination_can_build_is_not_a_pass():
    found = audit_sessions("nothing", 0, {"mechanism": "no mechanism of that name"})
    assert found.verdict == INCONCLUSIVE
    assert "no mechanism of that name" in found.reason


def test_a_record_reaches_the_bound_and_no_more():
    data = records(50.0 * torch.ones(1, 8, 8), 6)
    leak, worst = attacked({"mechanism": "iso"}, data, without_last(data, unit=False))
    assert leak is None
    assert worst == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_crowds_of_many_sizes_move_by_one_record():
    found = sessions.audit_crowds("iso", {"mechanism": "iso"}, "cpu")
    assert found.verdict == CONSISTENT, found.reason


def test_a_crowd_shows_what_rounding_by_the_batch_size_does(monkeypatch):
    from erlangen.audit.broken import sessions as broken_sessions

    plain = sessions.attacked
    monkeypatch.setattr(sessions, "attacked", lambda *args: plain(*args, broken_sessions.MeanInHalfPrecision))
    monkeypatch.setattr(sessions, "CROWDS", (1500,))
    found = sessions.audit_crowds("broken", {"mechanism": "iso"}, "cpu")
    assert "equal records" in found.reason
