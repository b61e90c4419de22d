"""What lies beside a certificate and speaks of it: the page for people.

Whoever signs off a model reads the page, not the JSON; so the page is rendered again and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Any

from .certificate_text import markdown


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
