"""The page of a certificate: what it means, in words that need no knowledge of the code."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from typing import Any

import pytest

import erlangen.accounting as acc
from erlangen.accounting import certificate as cert
from erlangen.accounting.certificate_text import markdown
from erlangen.accounting.ledger_format import Book, Release
from erlangen.accounting.words import meaning

MECHANISM = {
    "name": "iso", "noise_multiplier": 1.0, "clipping": "AdaptiveQuantile", "geometry": "Geometry", "noise_std": None,
    "as_published": False, "bounds": {"2.weight": 1.41421356}, "covariance": "1·I",
}  # fmt: skip


def document(unit: str = "record", neighbouring: Any = "add-or-remove-one", **facts: Any) -> dict[str, Any]:
    release = Release(acc.poisson(0.01, acc.gaussian(1.0)), 1.0, 1.0, 0.01, neighbouring=neighbouring, unit=unit)
    header = {"run": "r", "data": "scans:1", "unit": unit}
    told = {"sampler": {"units": 800, "sample_rate": 0.01, "secure": True}, "mechanism": MECHANISM, "data_size": 2400}
    return cert.build(Book(header, (release,), (100,)), 1e-5, copy.deepcopy({**told, **facts}))


def row(page: str, name: str) -> str:
    return next(line for line in page.split("\n") if line.startswith(f"| {name} |"))


def test_facts_are_said_in_words():
    page = markdown(document())
    assert row(page, "sampler") == "| sampler | units: 800; sample rate: 0.01; secure: yes |"
    assert row(page, "mechanism") == (
        "| mechanism | name: iso; noise multiplier: 1; clipping: adaptive-quantile; noise std: not available; as published: no; "
        "bounds: (2.weight: 1.414); covariance: 1·I |"
    )
    told = {"mechanism": {"clipping": "Flat", "geometry": "Diagonal"}, "audit": {"lower_bound": 0.4}}
    page = markdown(document(**told))
    assert row(page, "mechanism") == "| mechanism | clipping: flat; geometry: diagonal |"
    assert row(page, "audit") == "| audit | lower bound: 0.4 |"
    assert row(markdown(document(audit=None)), "audit") == "| audit | none |"


def test_both_numbers_that_are_public_are_on_the_page():
    made = document("patient")
    assert "the number of records, and the number of units of privacy" in made["data"]["note"]
    assert row(markdown(made), "treated as public") == f"| treated as public | {made['data']['note']} |"


@pytest.mark.parametrize(
    ("unit", "neighbouring", "words"),
    [
        ("record", "add-or-remove-one", "with a given record in the training data as without, plus 1.0e-05"),
        ("patient", "add-or-remove-one", "with a given patient in the training data as without, plus 1.0e-05"),
        ("record", "replace-one", "with a given record in the training data as with another record in its place, plus 1.0e-05"),
    ],
)
def test_the_page_says_what_epsilon_means(unit, neighbouring, words):
    made = document(unit, neighbouring)
    (said,) = (line for line in markdown(made).split("\n") if words in line)
    times = float(said.split(" is at most ")[1].split(" times as likely")[0])
    assert 1 <= times / math.exp(made["guarantee"]["best_epsilon"]) < 1.01
    assert ("All records of one patient are protected together" in said) == (unit == "patient")
    assert meaning(made["guarantee"]["best_epsilon"], 1e-5, unit, neighbouring) in said


def test_without_a_guarantee_nothing_is_promised():
    made = cert.build(Book({"run": "r"}, (Release(acc.non_private("x")),), (1,)), 1e-5)
    assert "times as likely" not in markdown(made)
    assert "with certainty" in markdown(made)


def test_a_page_needs_no_torch():
    code = "import sys, erlangen.accounting.certificate_check as check; assert check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
