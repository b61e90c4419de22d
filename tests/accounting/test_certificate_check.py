"""Distrust of a certificate beyond its numbers: how many there were, what it must say, and what lies beside it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

import erlangen.accounting as acc
from erlangen.accounting import certificate as cert
from erlangen.accounting.certificate_check import check
from erlangen.accounting.ledger import Ledger, Release, read_ledger

SAMPLER = {"name": "poisson", "units": 800, "expected_batch": 8.0, "sample_rate": 0.01, "secure": True}
FACTS = {"sampler": SAMPLER, "data_size": 800, "expected_batch": 8.0, "secure": True, "config": {"batch": 8.0}}


def certified(folder: Path, unit: str = "record", **facts: Any) -> dict[str, Any]:
    """The certificate of a hundred steps at q = 0.01, σ = 1, written into the folder beside its ledger."""
    step = Release(acc.poisson(0.01, acc.gaussian(1.0)), 1.0, 1.0, 0.01, unit=unit, mechanism="iso")
    with Ledger.create(folder / "ledger.jsonl", {"options": {"batch": 8.0}}, data="scans:1", run="r", unit=unit) as ledger:
        ledger.spend(step, 100)
    document = cert.build(read_ledger(folder / "ledger.jsonl"), 1e-5, copy.deepcopy({**FACTS, **facts}))
    cert.save(document, folder)
    return document


WRONG_SIZES = {
    "more units": (lambda d: d["sampler"].update(units=100_000), "sampler.units = 100000, .* those of 800 units"),
    "more records": (lambda d: d["data"].update(size=100_000), "data.size = 100000 records, .* 800 units"),
    "more of both": (lambda d: (d["sampler"].update(units=10**5), d["data"].update(size=10**5)), "those of 800 units"),
    "a larger batch of more units": (
        lambda d: (d["sampler"].update(units=8000, expected_batch=80.0), d["data"].update(size=8000)),
        "^expected_batch = 8, but sampler.expected_batch = 80",
    ),
    "a larger batch, beside the sampler too": (
        lambda d: (d["sampler"].update(units=8000, expected_batch=80.0), d["data"].update(size=8000),
                   d.update(expected_batch=80.0)),
        "config.batch = 8, but sampler.expected_batch = 80",
    ),
    "a larger batch wherever the certificate says it": (
        lambda d: (d["sampler"].update(units=8000, expected_batch=80.0), d["data"].update(size=8000),
                   d.update(expected_batch=80.0, config={"batch": 80.0})),
        "batch is 80.0 in the configuration, and 8.0 in the ledger",
    ),
    "no batch in the sampler": (
        lambda d: (d["sampler"].pop("expected_batch"), d["sampler"].update(units=100_000)), "those of 800 units"
    ),
    "a word": (lambda d: d["sampler"].update(units="many"), "sampler.units = many is not a number above 0"),
    "beyond every float": (lambda d: d["data"].update(size=10**400), "not a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", WRONG_SIZES)
def test_how_many_there_were_follows_from_rate_and_batch(lie, tmp_path):
    """Whoever thinks that 1 of 100,000 was drawn where it was 1 of 800 trusts a δ that is too large."""
    document = certified(tmp_path)
    assert check(document, ledger=tmp_path / "ledger.jsonl") == []
    change, words = WRONG_SIZES[lie]
    change(document)
    assert any(re.search(words, problem) for problem in check(document, ledger=tmp_path / "ledger.jsonl"))


def test_units_of_several_records_are_no_more_than_the_records(tmp_path):
    document = certified(tmp_path, "patient", data_size=2400)
    assert check(document) == []
    document["data"]["size"] = 700
    assert "data.size = 700 records, but the sampler draws from 800 units of privacy (patient)" in check(document)


@pytest.mark.parametrize(
    "facts",
    [
        {"sampler": "Poisson", "data_size": 60000, "config": None, "expected_batch": None},
        {"sampler": None, "config": {}, "data_size": None},
        {"sampler": {"sample_rate": 0.01}, "config": {"batch": 0}},  # 0: chosen by the number of records
        {"sampler": {"name": "one's own", "units": 800}},
    ],
)
def test_a_certificate_need_not_say_how_many(facts, tmp_path):
    assert check(certified(tmp_path, **facts)) == []


@pytest.mark.parametrize("left", range(len(cert.ALWAYS_NOT_COVERED)))
def test_what_no_certificate_covers_is_in_every_one(left, tmp_path):
    document = certified(tmp_path, not_covered=["the weights that training began with"])
    assert check(document) == []
    document["not_covered"].remove(cert.ALWAYS_NOT_COVERED[left])
    (problem,) = check(document)
    assert cert.ALWAYS_NOT_COVERED[left][:60] in problem
    document["not_covered"] = []
    assert len(check(document)) == len(cert.ALWAYS_NOT_COVERED)
