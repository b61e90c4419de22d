"""Budgets over runs: what a data set has spent, over every ledger that touched it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import strict_json
from .epsilon import AccountingError, Method, Neighbouring, epsilon
from .ledger import LedgerError, copy_path, passed_through, read_ledger
from .ledger_format import Book
from .protected import NAMELESS

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LEDGER_NAME, VALIDATION_NAME = "ledger.jsonl", "validation-ledger.jsonl"
UNKNOWN = "unknown"
"""Runs without a fingerprint are added up together: they may have used the same data."""


@dataclass(frozen=True)
class Spent:
    """Everything that was released from one data set."""

    fingerprint: str
    books: tuple[Book, ...]

    @property
    def runs(self) -> list[str]:
        return [book.run for book in self.books]

    @property
    def steps(self) -> int:
        return sum(book.steps for book in self.books)

    def pairs(self) -> list[tuple[DpEvent, int]]:
        """The releases of all runs: adaptive composition adds them up."""
        return [pair for book in self.books for pair in book.pairs()]

    @property
    def neighbouring(self) -> Neighbouring:
        used = {book.neighbouring for book in self.books if book.steps}
        if len(used) > 1:
            raise LedgerError(f"data {self.fingerprint}: runs under {' and '.join(sorted(used))} do not add up")
        return used.pop() if used else "add-or-remove-one"

    @property
    def units(self) -> list[str]:
        return sorted({unit for book in self.books for unit in book.units})

    @property
    def mixed(self) -> str | None:
        """Why the runs do not add up, where they protect different units: one record can move the clipped gradient of its
        patient by two bounds, so that what a run promises to patients it promises to no single record. Patients who have other
        records in another run are other units, whatever they are called."""
        if len(self.units) > 1:
            return (
                f"the runs protect different units ({', '.join(self.units)}): what one promises to a unit it does not promise to a "
                "part of it, nor to several together. Add up the runs of each unit by themselves"
            )
        if self.units == [NAMELESS] and len({book.data or UNKNOWN for book in self.books if book.steps}) > 1:
            return (
                "the runs protect groups without a name on different data, and whether one is part of another cannot be known. Say "
                "what they are when you train (unit, --unit: patient, say), or add up the runs of each data set by themselves"
            )
        found: dict[str, Book] = {}
        for book in self.books:
            grouping, data = book.header.get("units"), book.data or UNKNOWN
            if grouping is None or not book.steps:  # a ledger written by hand may not say who belongs together
                continue
            first = found.setdefault(data, book)
            if first.header["units"] != grouping:
                return (
                    f"the runs {first.run} and {book.run} put the records of data {data} together in different ways, both by "
                    f"{', '.join(self.units)}: what one promises to a unit the other promises to a part of it, or to parts of "
                    "several. Add up the runs of each grouping by themselves"
                )
        return None

    def epsilon(self, delta: float, method: Method = "pld") -> float:
        """ε of all runs together; ∞ where they protect different units, by name or by who belongs together."""
        return math.inf if self.mixed else epsilon(self.pairs(), delta, method, self.neighbouring)


def ledger_path(run: str | os.PathLike[str]) -> Path:
    """The ledger of a run: the path of its folder, or of the ledger itself, of its second copy, or of a link to either."""
    path = Path(run)
    if path.is_dir():
        return path / LEDGER_NAME
    file = path.resolve() if path.is_symlink() else path
    return file.with_name(file.name.removesuffix(copy_path("").name))


def ledgers_of(run: str | os.PathLike[str]) -> list[Path]:
    """Every ledger of a run: of its training, and of the private validation records it was tried on. Whoever names the first by
    its file means the run, too."""
    training = ledger_path(run)
    beside = training.parent / VALIDATION_NAME
    found = training.name == LEDGER_NAME and (beside.exists() or copy_path(beside).exists())
    return [training, *([beside] if found else [])]


def refuse_rolled_back(ledger: Path, book: Book, single_copy: bool = False) -> None:
    """A ledger that never stood where the certificate beside it ends has lost releases, or counts those of another run."""
    beside = ledger.parent / "certificate.json"
    if ledger.name != LEDGER_NAME or book.notes or not beside.is_file():
        return
    try:
        document = strict_json.read(beside, "certificate")
        head = dict(document["ledger"]["head"])
    except (ValueError, KeyError, TypeError):
        return  # `verify` says what is wrong with it
    if not passed_through(ledger, head, single_copy):
        raise LedgerError(
            f"{ledger} never stood where certificate.json beside it ends, after {document.get('steps')!s:.20} releases: it was "
            f"rolled back to {book.steps}, or is another run's. Restore the ledger, or treat the run as not private (ε = ∞)"
        )


def compose_runs(runs: Sequence[str | os.PathLike[str]], single_copy: bool = False) -> list[Spent]:
    """What each data set has spent over these runs. A ledger named twice counts once; a copied run counts again."""
    books: dict[Path, Book] = {}
    for ledger in (ledger for run in runs for ledger in ledgers_of(run)):
        path = ledger.resolve()
        if path not in books:
            books[path] = read_ledger(path, single_copy)
            refuse_rolled_back(path, books[path], single_copy)
    groups: dict[str, list[Book]] = {}
    for book in books.values():
        groups.setdefault(book.data or UNKNOWN, []).append(book)
    return [Spent(fingerprint, tuple(members)) for fingerprint, members in sorted(groups.items())]


def overlapping(spent: Sequence[Spent]) -> Spent:
    """What whoever is in all of these data sets has spent: a set with one record more or less has another fingerprint, and the
    others in it have paid in both."""
    return Spent(" and ".join(group.fingerprint for group in spent), tuple(book for group in spent for book in group.books))


def with_training(training: Book | None, validated: Book, delta: float) -> tuple[float, str | None]:
    """ε of a record that was trained on and validated on, too: ∞ where nobody knows what training cost, or where it protected
    another unit, whose ε is not that of a single record of it. And why."""
    if training is None:
        return math.inf, "the run has no ledger that says what training cost"
    both = Spent(training.data or UNKNOWN, (training, validated))
    others = sorted(set(both.units) - {"record"})
    if others:
        return math.inf, f"training protected each {others[0]} as a whole, and its ε is not that of a single record"
    try:
        return both.epsilon(delta), None
    except AccountingError:
        return both.epsilon(delta, "rdp"), None  # what only RDP can price: repeat-and-select
    except LedgerError as error:
        return math.inf, str(error)


def with_one_each(training: Book | None, validated: Book, delta: float) -> tuple[str, float] | None:
    """(unit, ε) of training and validation together for each unit that no more than one of the validated records belongs to:
    all of such a unit moves the training's sum by its bound, and the counts by one. None where training protects records."""
    if training is None or len(training.units) != 1 or training.units == ["record"] or validated.units != ["record"]:
        return None
    pairs = [*training.pairs(), *validated.pairs()]
    if {training.neighbouring, validated.neighbouring} != {"add-or-remove-one"}:
        return None
    try:
        spent = epsilon(pairs, delta)
    except AccountingError:
        spent = epsilon(pairs, delta, "rdp")
    return training.units[0], spent
