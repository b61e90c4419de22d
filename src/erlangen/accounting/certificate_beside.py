"""What lies beside a certificate: the weights it speaks of, the page for people, and what was released after it was written.

Whoever signs off a model reads the page, not the JSON; so the page is rendered again and compared. Private validation has a
ledger of its own, which the certificate of the training does not count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Any

from .certificate_text import markdown, printable, promised
from .compose import VALIDATION_NAME, with_one_each, with_training
from .ledger import copy_path, read_ledger
from .ledger_format import Book, LedgerError, Release


def page_problems(path: Path, document: Mapping[str, Any]) -> list[str]:
    """Where the page beside the certificate at `path` is not what `document` says; nothing without a page."""
    page = path.with_suffix(".md")
    if not page.exists():
        return []
    try:
        found = page.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return [f"{page} cannot be read, and may say anything: {error.strerror}"]
    try:
        wanted = markdown(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{page} cannot be compared: the certificate has no page ({type(error).__name__}: {str(error)[:60]})"]
    lines = zip_longest(found.rstrip().split("\n"), wanted.rstrip().split("\n"))
    for number, (has, should) in enumerate(lines, 1):
        if has != should:
            what = "is missing" if has is None else f"is {has[:160]!r}"
            cure = "should not be there" if should is None else f"should be {should[:160]!r}"
            again = f"write it again with: erlangen inspect {quote(str(path))} > {quote(str(page))}"
            return [f"{page} is not the page of this certificate: line {number} {what}, and {cure}; {again}"]
    return []


def weights_beside(path: Path, document: Mapping[str, Any]) -> tuple[bool | None, list[str]]:
    """(whether the weights beside the certificate at `path` were compared, the problem if they are others).

    None where it names no weights, as those of earlier versions and of a ledger alone; False where it travels without them.
    """
    weights = path.parent / "weights.safetensors"
    if "weights" not in document:
        return None, []
    if not weights.exists():
        return False, []
    try:
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    except OSError as error:
        return False, [f"{weights} cannot be read, and may be any model: {error.strerror}"]
    if digest == document["weights"]:
        return True, []
    stated = document["weights"][:64]
    return True, [
        f"{weights} is not the model of this certificate: its SHA-256 is {digest}, and should be {stated}; restore the file, or "
        "treat the model as not private"
    ]


@dataclass(frozen=True)
class Validation:
    """What private validation beside a certificate released, of which the certificate says nothing."""

    epsilon: float
    """Of training and validation together, for a record that is among both; ∞ where they do not add up."""
    on_training: bool
    """Whether it was on the very records of the training, so that each of them has spent that; or nobody knows."""
    words: str


def validated(
    path: Path, document: Mapping[str, Any], releases: Sequence[tuple[Release, int]], single_copy: bool
) -> Validation | None:
    """What the validation ledger beside the certificate counts; None without one."""
    ledger = path.parent / VALIDATION_NAME
    if not ledger.exists() and not copy_path(ledger).exists():
        return None
    try:
        book = read_ledger(ledger, single_copy)
    except (LedgerError, ValueError, OSError) as error:
        return Validation(math.inf, True, f"what validation cost beyond the certificate is not known: {error}")
    if not book.steps:
        return None
    data = document["data"].get("fingerprint")
    header = {"run": document["run"], "data": data}
    training = Book(header, tuple(release for release, _ in releases), tuple(count for _, count in releases))
    spent, why = with_training(training, book, document["delta"])
    same, delta = data == book.data, promised(document["delta"])
    which = "the records of the training" if same else "other records (another fingerprint)"
    whom = "for each record" if same else "for a record that is among both"
    words = (
        f"{VALIDATION_NAME} counts {book.steps} releases more, on {which}, which the certificate does not: together "
        f"ε = {promised(spent if math.isfinite(spent) else 'inf')} at δ = {delta} {whom}{f' ({why})' if why else ''}"
    )
    one_each = with_one_each(training, book, document["delta"])
    if one_each is not None and math.isfinite(one_each[1]):
        unit = printable(one_each[0])
        words += f"; ε = {promised(one_each[1])} for each {unit} to whom no more than one of those records belongs"
    return Validation(spent, same, words)
