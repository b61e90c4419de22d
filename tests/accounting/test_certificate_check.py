"""Distrust of a certificate beyond its numbers: how many there were, what it must say, and what lies beside it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

import erlangen.accounting as acc
from erlangen.accounting import certificate as cert
from erlangen.accounting.certificate_check import check, examine, verify
from erlangen.accounting.ledger import Ledger, Release, read_ledger
from erlangen.accounting.words import upper

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
    assert cert.ALWAYS_NOT_COVERED[left] in problem
    document["not_covered"] = []
    assert len(check(document)) == len(cert.ALWAYS_NOT_COVERED)


def test_which_numbers_are_public_is_in_every_certificate(tmp_path):
    document = certified(tmp_path)
    document["data"]["note"] = "the number of records is treated as public"  # as earlier certificates say it
    assert check(document) == []
    document["data"]["note"] = "nobody knows how many there are"
    assert "the number of units of privacy" in check(document)[0]


# --- the page beside it --------------------------------------------------------------------------------------------

FALSE_PAGES = {
    "less spent": (lambda page: page.replace("δ) = (0.", "δ) = (0.0"), r"line 3 is '\*\*\(ε, δ\) = \(0\.0\d+, .* should be '"),
    "a sentence less": (lambda page: page[: page.rindex("- flaws of")], r"line \d+ is missing, and should be '- flaws of"),
    "a sentence more": (lambda page: page + "The training loss is covered, too.\n", "is 'The training .* should not be there"),
    "nothing": (lambda page: "", "line 1 is '', and should be '# Privacy certificate'"),
    "no text": (lambda page: "\x1b[8m\udcff", r"line 1 is '\\x1b\[8m�'"),  # and nothing that a terminal would obey
}


@pytest.mark.parametrize("lie", FALSE_PAGES)
def test_the_page_is_the_certificates(lie, tmp_path):
    """People read the page: there ε = 499.9 became 0.1, and the certificate beside it verified."""
    certified(tmp_path)
    page, path = tmp_path / "certificate.md", tmp_path / "certificate.json"
    honest = page.read_text()
    change, words = FALSE_PAGES[lie]
    page.write_bytes(change(honest).encode(errors="surrogateescape"))
    (problem,) = verify(path)
    assert problem.startswith(f"{page} is not the page of this certificate: line ")
    assert re.search(words, problem)
    assert verify(path, page=False) == []
    page.write_text(honest.replace("\n", "\r\n") + "\n")  # the same page as another system and `inspect` end its lines
    assert verify(path) == []
    page.unlink()  # a certificate may travel alone
    assert verify(path) == []


def test_the_page_of_a_certificate_that_does_not_hold_is_no_matter(tmp_path):
    document = certified(tmp_path)
    document["steps"] = 99
    path = cert.save(document, tmp_path)
    (tmp_path / "certificate.md").write_text("forged, too")
    assert all("page" not in problem for problem in verify(path))


def test_a_certificate_of_which_no_page_can_be_made(tmp_path):
    document = certified(tmp_path)
    del document["ledger"]["notes"]
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    assert "cannot be compared" in verify(tmp_path / "certificate.json")[0]


# --- validation after training -------------------------------------------------------------------------------------


def validation(folder: Path, data: str = "scans:1", **facts: Any) -> None:
    with Ledger.create(folder / "validation-ledger.jsonl", data=data, block=1) as ledger:
        ledger.spend(Release(acc.gaussian(5.0), **facts), 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("scans:1", "counts 2 releases more, on the records of the training, .* for each record$"),
        ("other", "counts 2 releases more, on other records .* for a record that is among both$"),
    ],
)
def test_validation_on_private_records_adds_to_what_the_certificate_says(data, words, tmp_path):
    """Two counts of the training records are two releases more from each of them, and nobody was told."""
    document = certified(tmp_path)
    path = tmp_path / "certificate.json"
    assert examine(path).remarks == ()
    validation(tmp_path, data)
    found = examine(path)
    assert found.problems == ()
    together = acc.epsilon([(acc.poisson(0.01, acc.gaussian(1.0)), 100), (acc.gaussian(5.0), 2)], 1e-5)
    assert found.certified is not None
    assert found.certified["epsilon_with_validation"] == pytest.approx(together, rel=1e-9)
    assert found.certified["epsilon"] == document["guarantee"]["best_epsilon"] < 0.9 * together
    (remark,) = found.remarks
    assert re.search(words, remark)
    assert f"ε = {upper(together, 4)} at δ = 1e-05" in remark
    for ledger in tmp_path.glob("ledger.jsonl*"):
        ledger.unlink()
    assert len(examine(path).remarks) == 2, "the certificate's own releases are enough to add up"


def test_validation_that_does_not_add_up_costs_everything(tmp_path):
    cases = {"patients": ("patient", {}), "replaced": ("record", {"neighbouring": "replace-one"})}
    for name, (unit, facts) in cases.items():
        certified(tmp_path / name, unit)
        validation(tmp_path / name, **facts)
    for name, why in (("patients", "training protected each patient as a whole"), ("replaced", "do not add up")):
        found = examine(tmp_path / name / "certificate.json")
        assert found.problems == ()
        assert found.certified is not None
        assert found.certified["epsilon_with_validation"] == "inf"
        assert "together ε = ∞" in found.remarks[0]
        assert why in found.remarks[0]


def test_a_validation_ledger_that_cannot_be_read_is_said(tmp_path):
    certified(tmp_path)
    validation(tmp_path)
    (tmp_path / "validation-ledger.jsonl.copy").unlink()
    (remark,) = examine(tmp_path / "certificate.json").remarks
    assert "what validation cost beyond the certificate is not known" in remark
    (remark,) = examine(tmp_path / "certificate.json", single_copy=True).remarks
    assert "counts 2 releases more" in remark


def test_what_only_rdp_can_price_adds_up_too(tmp_path):
    search = acc.repeat_and_select(acc.composed(acc.gaussian(20.0), 10), 5.0)
    with Ledger.create(tmp_path / "ledger.jsonl", data="scans:1", run="r") as ledger:
        ledger.spend(Release(search))
    path = cert.save(cert.build(read_ledger(tmp_path / "ledger.jsonl"), 1e-5), tmp_path)
    validation(tmp_path)
    found = examine(path)
    assert found.certified is not None
    assert found.certified["epsilon"] < found.certified["epsilon_with_validation"] < 10
