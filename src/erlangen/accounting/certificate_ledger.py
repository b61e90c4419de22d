"""A certificate against the ledger of its run: what was written down as it happened is nowhere less, and nothing is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import strict_json
from .ledger import Release
from .ledger_format import Book


def against_ledger(document: Mapping[str, Any], releases: list[tuple[Release, int]], book: Book) -> list[str]:
    """Problems: another run or other records, releases or statements that the certificate leaves out, other options."""
    if book.run != document["run"]:
        return [f"the ledger is of run {book.run}, the certificate of {document['run']}"]
    certified: dict[str, int] = {}
    for release, count in releases:
        key = strict_json.dumps(release.to_json())
        certified[key] = certified.get(key, 0) + count
    counted: dict[str, int] = {}
    for release, count in zip(book.releases, book.counts):  # two kinds of a ledger may be the same release
        key = strict_json.dumps(release.to_json())
        counted[key] = counted.get(key, 0) + count
    kinds = {strict_json.dumps(release.to_json()): release for release in book.releases}
    problems = []
    for key, count in counted.items():
        listed = certified.get(key, 0)
        if count > listed:
            problems.append(f"the ledger counts {count} releases of {kinds[key].event!r:.80}, the certificate {listed}")
    if book.data != document["data"].get("fingerprint"):
        problems.append("the data fingerprint is not the ledger's")
    return [*problems, *_left_out(document, book), *_against_options(document, book)]


def _left_out(document: Mapping[str, Any], book: Book) -> list[str]:
    """What the ledger says that every certificate of its run states: left out, it could be compared with nothing."""
    names = book.header.get("stated")
    kinds = {"sampler": Mapping, "mechanism": Mapping, "expected_batch": (int, float), "weights": str}
    unsaid = [words for words in book.not_covered if words not in document["not_covered"]]
    return [
        f"{name} is left out, which every certificate of this run states"
        for name in (names if isinstance(names, list) else ())
        if name in kinds and not isinstance(document.get(name), kinds[name])  # type: ignore[arg-type]
    ] + [f"not_covered leaves out what the ledger says: {words!r:.160}" for words in unsaid]


def _against_options(document: Mapping[str, Any], book: Book) -> list[str]:
    """The options that the run began with, and the statistics that it shows without a guarantee, as its ledger keeps them."""
    began, shown = (book.header.get(name) for name in ("options", "non_private"))
    config, problems = document["config"] or {}, []
    for name, value in began.items() if isinstance(began, Mapping) else ():
        if name not in config or config[name] != value:
            problems.append(f"{name} is {config.get(name)!r:.40} in the configuration, and {value!r:.40} in the ledger")
    for name in shown if isinstance(shown, list) else ():
        if name not in document["non_private"]:
            problems.append(f"non_private does not name {name!r:.40}, which the ledger does")
    weights = book.header.get("weights")
    if weights is not None and not any(isinstance(words, str) and str(weights) in words for words in document["not_covered"]):
        problems.append(f"not_covered does not name the weights that training began with, SHA-256 {weights!s:.64}")
    return problems
