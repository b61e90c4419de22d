"""What is said of ε in few digits is never less than ε."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import erlangen
from erlangen.accounting.certificate_text import headline
from erlangen.accounting.words import factor, is_weak, upper


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        (1.0041, 3, "1.01"), (1.0, 3, "1"), (2.9999999, 4, "3"), (0.1, 4, "0.1"), (8.0, 3, "8"), (1234.5, 3, "1.24e+03"),
        (math.inf, 3, "∞"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [(3.0, "20.1"), (0.0, "1"), (10.0, "22,100"), (50.0, "5.19e+21"), (277.0, "10^121"), (25_400.0, "10^11032")],
)
def test_the_factor_is_rounded_up_and_never_too_large_to_say(epsilon, said):
    assert factor(epsilon) == said
    if "^" in said:
        assert epsilon <= math.log(10) * int(said.removeprefix("10^"))
    else:
        assert math.exp(epsilon) <= float(said.replace(",", ""))


def test_a_guarantee_is_weak_from_one_epsilon_on():
    assert [is_weak(e) for e in (0.0, 3.0, 10.0, 10.01, 500.0, math.inf)] == [False, False, False, True, True, False]


def test_delta_is_added_and_is_no_probability_that_epsilon_fails():
    """A Gaussian release of μ = 1: its privacy loss is N(½, 1). At the ε of δ = 1e-5 the loss exceeds ε with probability 4.4e-5, so
    "a factor e^ε except with probability δ" would be untrue; "at most e^ε times as likely, plus δ" is the definition."""
    tail = lambda x: math.erfc(x / math.sqrt(2)) / 2  # noqa: E731
    delta = lambda e: tail(e - 0.5) - math.exp(e) * tail(e + 0.5)  # noqa: E731
    epsilon = 4.377178
    assert delta(epsilon) == pytest.approx(1e-5, rel=1e-3)
    assert tail(epsilon - 0.5) > 4 * delta(epsilon)
    texts = [p for kind in ("*.py", "*.js") for p in Path(erlangen.__file__).parent.rglob(kind) if "audit" not in p.parts]
    assert not [p for p in texts if "except with probability" in p.read_text(encoding="utf-8")]
