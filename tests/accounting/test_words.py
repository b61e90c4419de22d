"""Few digits of ε never say less than ε: rounded up, wherever a person reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import erlangen
from erlangen.accounting.words import upper


@given(st.floats(1e-12, 1e6), st.integers(1, 6))
def test_few_digits_are_never_below(value, digits):
    assert float(upper(value, digits)) >= value
    assert float(upper(value, digits)) <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)


@pytest.mark.parametrize(("value", "said"), [(2.9971, "3"), (2.0001, "2.01"), (float("inf"), "inf"), (0.0, "0")])
def test_in_three_digits(value, said):
    assert upper(value, 3) == said


def test_no_sentence_rounds_epsilon_to_the_nearest():
    """``ε = {x:.3g}`` in a text for people would say 2.00 of 2.004."""
    nearest = re.compile(r"ε\s?=?\s?\{[^{}]*:\.\d[gf]\}")
    texts = {str(path): path.read_text(encoding="utf-8") for path in Path(erlangen.__file__).parent.rglob("*.py")}
    assert not {name: nearest.findall(text) for name, text in texts.items() if nearest.search(text)}
