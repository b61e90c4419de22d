"""What is said of ε in few digits is never less than ε."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import erlangen
from erlangen.accounting.certificate_text import headline
from erlangen.accounting.words import upper


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [(1.0041, 3, "1.01"), (1.0, 3, "1"), (2.9999999, 4, "3"), (0.1, 4, "0.1"), (8.0, 3, "8"), (1234.5, 3, "1.24e+03")],
)
def test_promises_are_rounded_up(value, digits, said):
    assert upper(value, digits) == said


def test_probabilities_too():
    assert upper(1.61e-6, 2, "e") == "1.7e-06"
    assert upper(1e-5, 2, "e") == "1.0e-05"


@given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_by_less_than_one_in_the_last_digit(value, digits):
    said = float(upper(value, digits))
    assert value <= said <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)


def test_a_certificate_says_no_less_than_it_certifies():
    document = {"guarantee": {"private": True, "best_epsilon": 1.00049}, "delta": 1.00004e-5, "randomness": "secure"}
    assert headline(document) == "(ε, δ) = (1.001, 1.001e-05) differential privacy."


def test_no_sentence_rounds_epsilon_to_the_nearest():
    """``ε = {x:.3g}`` in a text for people would say 2.00 of 2.004."""
    nearest = re.compile(r"ε\s?=?\s?\{[^{}]*:\.\d[gf]\}")
    texts = {str(path): path.read_text(encoding="utf-8") for path in Path(erlangen.__file__).parent.rglob("*.py")}
    assert not {name: nearest.findall(text) for name, text in texts.items() if nearest.search(text)}
