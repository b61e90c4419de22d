"""The statement is no better than the guarantee: an ε that protects nobody much is not called protection."""

from __future__ import annotations

import dataclasses
import math

import pytest

from erlangen.report import build, read, render
from erlangen.report.folder import Run
from erlangen.report.privacy import statement


def promising(run: Run, epsilon: float) -> Run:
    """The run with another ε, and nothing else to be careful about."""
    assert run.certificate is not None
    best = {**run.certificate["guarantee"], "best_epsilon": epsilon if math.isfinite(epsilon) else "inf"}
    return dataclasses.replace(run, certificate={**run.certificate, "randomness": "secure", "guarantee": best})


@pytest.mark.parametrize(
    ("epsilon", "tone", "words"),
    [
        (3.0, "good", "Each record is protected: ε = 3 at"),
        (10.0, "good", "Each record is protected: ε = 10 at"),
        (10.5, "careful", "eᵋ is 36,400."),
        (500.0, "careful", "eᵋ is 10^218."),
        (math.inf, "bad", "no privacy guarantee"),
    ],
)
def test_the_tone_is_that_of_the_guarantee(trained, epsilon, tone, words):
    found = statement(promising(read(trained), epsilon))
    assert found.tone == tone
    assert words in found.headline
    assert found.headline.startswith("A weak guarantee for each record") is (tone == "careful")


def test_the_page_shows_it(trained):
    page = render(build([promising(read(trained), 500.0)]))
    assert 'class="statement careful"' in page
    assert "is protected" not in page
