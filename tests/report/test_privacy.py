"""The statement is no better than the guarantee: an ε that protects nobody much is not called protection."""

from __future__ import annotations

import dataclasses
import math
import shutil

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


def test_a_delta_above_one_over_their_number_is_no_protection(trained):
    """The page said that each record was protected, ε = 0 at δ = 0.5, and what spoke of publishing one was folded away."""
    run = promising(read(trained), 1.0)
    words = "delta is 0.5, above 1/1438: that allows to publish a record outright"
    certificate = {**run.certificate, "not_covered": [words, *run.certificate["not_covered"]]}
    found = statement(dataclasses.replace(run, certificate=certificate))
    assert found.headline.startswith("A weak guarantee for each record: ε = 1 at")
    assert (found.tone, found.warnings) == ("careful", (f"D{words[1:]}. Train with a smaller --delta.",))


def test_what_could_not_be_compared_is_said(trained, tmp_path):
    """Without its ledger a certificate may leave out what it likes: `verify` says so, and the page did not."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    assert not any("ledger" in words for words in statement(read(folder)).warnings)
    for name in ("ledger.jsonl", "ledger.jsonl.copy"):
        (folder / name).unlink()
    assert any("There is no ledger beside the certificate" in words for words in statement(read(folder)).warnings)


def test_no_generator_makes_up_for_a_guarantee_that_is_not_there(trained):
    assert any("--secure" in words for words in statement(read(trained)).warnings)
    run = read(trained)
    none = {**run.certificate, "guarantee": {**run.certificate["guarantee"], "private": False, "best_epsilon": "inf"}}
    assert not any("--secure" in words for words in statement(dataclasses.replace(run, certificate=none)).warnings)
