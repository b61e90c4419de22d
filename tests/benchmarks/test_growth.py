"""The growth benchmark: its fits are fits, and every axis can be measured, plain and private."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import growth


def test_lines_are_lines_and_squares_are_squares():
    line = growth.fit([{"x": x, "seconds": 3.0 * x + 1.0} for x in (1, 2, 4, 8)], "seconds")
    assert line["slope"] == pytest.approx(3.0)
    assert line["intercept"] == pytest.approx(1.0)
    assert line["r2"] == pytest.approx(1.0)
    square = growth.fit([{"x": x, "seconds": 5.0 * x * x} for x in (1, 2, 4, 8)], "seconds")
    assert square["exponent"] == pytest.approx(2.0)
    assert square["r2"] < 0.97


@pytest.mark.parametrize("axis", list(growth.START))
def test_every_axis_can_be_measured(axis):
    at = {**growth.TINY, "views": 2, "order": 2}
    for method in ("plain", "private"):
        found = growth.measure(axis, at, method, 1, "cpu")
        assert found["seconds"] > 0
        assert found["x"] == {"width": found["x"], "image": 64}.get(axis, at[axis])
