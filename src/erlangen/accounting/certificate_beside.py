"""What lies beside a certificate: the weights it speaks of, the page for people, and what was released after it was written.

Whoever signs off a model reads the page, not the JSON; so the page is rendered again and compared. Private validation has a
ledger of its own, which the certificate of the training does not count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Any

from .certificate_text import markdown, promised
from .compose import VALIDATION_NAME, with_training
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


def validated(
    path: Path, document: Mapping[str, Any], releases: Sequence[tuple[Release, int]], single_copy: bool
) -> tuple[float | str | None, str | None]:
    """(ε of a record that was trained on and validated on, in words) where a validation ledger lies beside the certificate."""
    ledger = path.parent / VALIDATION_NAME
    if not ledger.exists() and not copy_path(ledger).exists():
        return None, None
    try:
        book = read_ledger(ledger, single_copy)
    except (LedgerError, ValueError, OSError) as error:
        return "inf", f"what validation cost beyond the certificate is not known: {error}"
    if not book.steps:
        return None, None
    data = document["data"].get("fingerprint")
    header = {"run": document["run"], "data": data}
    training = Book(header, tuple(release for release, _ in releases), tuple(count for _, count in releases))
    spent, why = with_training(training, book, document["delta"])
    both: float | str = spent if math.isfinite(spent) else "inf"
    which = "the records of the training" if data == book.data else "other records (another fingerprint)"
    whom = "for each record" if data == book.data else "for a record that is among both"
    return both, (
        f"{VALIDATION_NAME} counts {book.steps} releases more, on {which}, which the certificate does not: together "
        f"ε = {promised(both)} at δ = {promised(document['delta'])} {whom}{f' ({why})' if why else ''}"
    )
