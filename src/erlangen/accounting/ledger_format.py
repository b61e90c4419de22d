"""The ledger's lines: what they say, how they are checked, how two copies are reconciled. No file is written here.

A ledger is a text file, one JSON value per line, each ending in a checksum chained to the line before:

    {"ledger":1,"run":"…","data":"…","unit":"record","block":64,"growth":0.4,"time":"…","sum":"4be1f02a"}
    {"define":0,"event":{…},"sensitivity":1.0,"sigma_eff":1.1,"q":0.01,"neighbouring":"…","unit":"…","time":…,"sum":…}
    [0,64,"91aa03fe"]                            64 releases of event 0 are reserved (they count from now on)
    [0,85,"77c0de11"]                            85 more
    {"unused":{"0":12},"time":"…","sum":"…"}     a clean exit gives back what it did not use
    {"session":"resumed","time":"…","sum":"…"}   a new process; whatever was not given back before is spent

The checksums detect damage, not forgery: whoever can write the file can recompute them. Signed certificates are the
answer to that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import strict_json
from .epsilon import NEIGHBOURING, Neighbouring
from .events import MAX_COUNT, EventError, from_json, to_json

if TYPE_CHECKING:
    from dp_accounting import DpEvent

VERSION = 1
_LINE = re.compile(rb'^(.*),(?:"sum":)?"([0-9a-f]{8})"([}\]])$', re.DOTALL)
_MAX_EVENTS = 100_000


class LedgerError(RuntimeError):
    """The ledger cannot be read or written; nothing must be released until it can."""


class NotALedger(LedgerError, ValueError):
    """There is no ledger where one was named."""


@dataclass(frozen=True)
class Release:
    """What one release is: its event (sampling included) and the facts a reader of the ledger wants beside it."""

    event: DpEvent
    sensitivity: float | None = None
    sigma_eff: float | None = None
    sample_rate: float | None = None
    neighbouring: Neighbouring = "add-or-remove-one"
    unit: str = "record"
    mechanism: str | None = None
    reason: str | None = None
    """Why there is no guarantee, where the event is non-private."""

    def to_json(self) -> dict[str, Any]:
        return {
            "event": to_json(self.event),
            "sensitivity": self.sensitivity,
            "sigma_eff": self.sigma_eff,
            "q": self.sample_rate,
            "neighbouring": self.neighbouring,
            "unit": self.unit,
            **({"mechanism": self.mechanism} if self.mechanism is not None else {}),
            **({"reason": self.reason} if self.reason is not None else {}),
        }

    @staticmethod
    def from_json(obj: dict[str, Any]) -> Release:
        relation = obj.get("neighbouring")
        if relation not in NEIGHBOURING:
            raise EventError(f"unknown neighbouring relation {str(relation)[:40]!r}")
        numbers = {key: obj.get(key) for key in ("sensitivity", "sigma_eff", "q")}
        texts = {key: obj.get(key) for key in ("unit", "mechanism", "reason")}
        for name, value in numbers.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise EventError(f"{name} must be a number")
        for name, value in texts.items():
            if value is not None and not isinstance(value, str):
                raise EventError(f"{name} must be text")
        return Release(
            event=from_json(obj.get("event")),
            sensitivity=numbers["sensitivity"],
            sigma_eff=numbers["sigma_eff"],
            sample_rate=numbers["q"],
            neighbouring=relation,
            unit=texts["unit"] or "record",
            mechanism=texts["mechanism"],
            reason=texts["reason"],
        )


@dataclass(frozen=True)
class Book:
    """The content of a ledger: its header, the kinds of release and how often each counts."""

    header: dict[str, Any]
    releases: tuple[Release, ...] = ()
    counts: tuple[int, ...] = ()
    lines: int = 1
    checksum: str = ""
    open_counts: tuple[int, ...] = ()
    """Reserved in the current session and not yet settled, per kind."""
    settled: bool = True
    notes: tuple[str, ...] = ()
    """Damage found and what was counted for it."""

    @property
    def run(self) -> str:
        return str(self.header["run"])

    @property
    def data(self) -> str | None:
        return self.header.get("data")

    @property
    def not_covered(self) -> list[str]:
        """What the run's guarantee does not speak about, as it was known when the run began."""
        said = self.header.get("not_covered")
        return [words for words in said if isinstance(words, str)] if isinstance(said, list) else []

    @property
    def steps(self) -> int:
        """Releases that count, over all kinds."""
        return sum(self.counts)

    def pairs(self) -> list[tuple[DpEvent, int]]:
        """Everything that counts, as (event, count)."""
        return [(release.event, count) for release, count in zip(self.releases, self.counts) if count]

    @property
    def units(self) -> list[str]:
        """Whom the counted releases protect."""
        return sorted({release.unit for release, count in zip(self.releases, self.counts) if count})

    @property
    def neighbouring(self) -> Neighbouring:
        """The one relation under which every counted release was made."""
        used = {release.neighbouring for release, count in zip(self.releases, self.counts) if count}
        if len(used) > 1:
            raise LedgerError(f"releases under different relations ({', '.join(sorted(used))}) do not add up")
        return used.pop() if used else "add-or-remove-one"

    def next_block(self, kind: int) -> int:
        """Size of the next reservation of one kind: `block`, growing with what was reserved before."""
        done = self.counts[kind] if kind < len(self.counts) else 0
        return max(int(self.header["block"]), int(done * float(self.header["growth"])))

    @property
    def head(self) -> dict[str, Any]:
        """Where the ledger stands, to be stored in checkpoints and certificates and found again later."""
        return {"run": self.run, "lines": self.lines, "sum": self.checksum}


def encode(record: dict[str, Any] | list[int], previous: str) -> tuple[bytes, str]:
    """One line (with its newline) and its checksum."""
    payload = strict_json.dumps(record)
    digest = checksum(payload.encode(), previous)
    name = '"sum":' if payload.endswith("}") else ""
    return f'{payload[:-1]},{name}"{digest}"{payload[-1]}\n'.encode(), digest


def checksum(payload: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + payload).hexdigest()[:8]


@dataclass
class Parsed:
    """One copy of a ledger as far as it can be trusted."""

    book: Book | None
    good: bytes
    """The longest valid prefix, in whole lines."""
    clean: bool
    """Whether the copy is nothing but that prefix."""
    trouble: str = ""
    sums: list[str] = field(default_factory=list)


def parse(data: bytes) -> Parsed:
    """Read one copy up to the first byte that does not fit."""
    book: Book | None = None
    sums: list[str] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        if end < 0:
            return Parsed(book, data[:position], False, f"the last line is torn ({len(data) - position} bytes)", sums)
        try:
            book = _line(data[position:end], book, sums[-1] if sums else "")
        except (EventError, strict_json.DocumentError, LedgerError) as error:
            return Parsed(book, data[:position], False, f"line {len(sums) + 1} is damaged ({error})", sums)
        sums.append(book.checksum)
        position = end + 1
    return Parsed(book, data, book is not None, "" if book is not None else "the file is empty", sums)


def passed_through(good: bytes, head: Mapping[str, Any]) -> bool:
    """Whether a ledger of these bytes once stood at `head`; another run's, or one that was rolled back, did not."""
    parsed, lines = parse(good), head.get("lines")
    return (
        parsed.book is not None
        and head.get("run") == parsed.book.run
        and isinstance(lines, int)
        and 1 <= lines <= len(parsed.sums)
        and parsed.sums[lines - 1] == head.get("sum")
    )


def _line(raw: bytes, book: Book | None, previous: str) -> Book:
    match = _LINE.match(raw)
    if match is None:
        raise LedgerError("no checksum")
    payload, digest = match[1] + match[3], match[2].decode()
    if checksum(payload, previous) != digest:
        raise LedgerError("wrong checksum")
    return advance(book, strict_json.loads(payload, "line"), digest)


def advance(book: Book | None, record: Any, digest: str) -> Book:
    """The book after one more record; anything that is not a valid next record raises."""
    if book is None:
        return Book(header=_header(record), checksum=digest)
    book = replace(book, lines=book.lines + 1, checksum=digest)
    if isinstance(record, list):
        kind, steps = _reservation(record, book)
        counts, open_counts = _plus(book.counts, kind, steps), _plus(book.open_counts, kind, steps)
        return replace(book, counts=counts, open_counts=open_counts, settled=False)
    if not isinstance(record, dict):
        raise LedgerError("neither an object nor a reservation")
    if "define" in record:
        if record["define"] != len(book.releases) or len(book.releases) >= _MAX_EVENTS:
            raise LedgerError("an event is defined out of order")
        release = Release.from_json(record)
        return replace(
            book,
            releases=(*book.releases, release),
            counts=(*book.counts, 0),
            open_counts=(*book.open_counts, 0),
        )
    if "unused" in record:
        return _settle(book, record["unused"])
    if "session" in record:
        return replace(book, open_counts=(0,) * len(book.counts), settled=True)
    if "repair" in record:
        return _repair(book, record)
    raise LedgerError("unknown record")


def _header(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict) or record.get("ledger") != VERSION:
        raise LedgerError(f"not the header of a version {VERSION} ledger")
    run, data, block, growth = (record.get(key) for key in ("run", "data", "block", "growth"))
    if not isinstance(run, str) or not (data is None or isinstance(data, str)):
        raise LedgerError("the header has no run id or data fingerprint")
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= MAX_COUNT:
        raise LedgerError("the header's block size is not a whole number above 0")
    if not isinstance(growth, (int, float)) or isinstance(growth, bool) or not 0 <= growth <= 10:
        raise LedgerError("the header's growth is not between 0 and 10")
    return record


def _reservation(record: list[Any], book: Book) -> tuple[int, int]:
    if len(record) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in record):
        raise LedgerError("a reservation is [event, steps]")
    kind, steps = record
    if not 0 <= kind < len(book.releases) or not 1 <= steps <= MAX_COUNT or book.counts[kind] + steps > MAX_COUNT:
        raise LedgerError("a reservation of an unknown event or an impossible number of steps")
    return kind, steps


def _settle(book: Book, unused: Any) -> Book:
    if not isinstance(unused, dict):
        raise LedgerError("a settlement lists unused steps per event")
    counts, open_counts = list(book.counts), list(book.open_counts)
    for key, steps in unused.items():
        kind = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else -1
        if not 0 <= kind < len(counts) or not isinstance(steps, int) or isinstance(steps, bool):
            raise LedgerError("a settlement of an unknown event")
        if not 0 <= steps <= open_counts[kind]:
            raise LedgerError("a settlement gives back more than its session reserved")
        counts[kind] -= steps
    return replace(book, counts=tuple(counts), open_counts=(0,) * len(counts), settled=True)


def _repair(book: Book, record: dict[str, Any]) -> Book:
    counted = record.get("counted")
    note = record["repair"]
    if not isinstance(counted, dict) or not isinstance(note, str):
        raise LedgerError("a repair says what it counted")
    counts = book.counts
    for key, steps in counted.items():
        kind = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else -1
        kind, steps = _reservation([kind, steps], book)
        counts = _plus(counts, kind, steps)
    return replace(book, counts=counts, notes=(*book.notes, note))


def _plus(counts: tuple[int, ...], kind: int, steps: int) -> tuple[int, ...]:
    return (*counts[:kind], counts[kind] + steps, *counts[kind + 1 :])


# --- two copies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reconciled:
    """What two copies of one ledger say together."""

    book: Book
    good: bytes
    """The bytes both copies should have."""
    torn: dict[int, int]
    """Steps to count, per kind, for a record that was being written when the process died."""
    notes: tuple[str, ...]
    missing: bool = False
    """Whether one of the two files does not exist."""


def reconcile(first: bytes | None, second: bytes | None) -> Reconciled:
    """The longest history that one undamaged copy proves.

    Each record is flushed to the first copy, then to the second, and only then used. So one clean copy misses at most
    the one record that was being written, and that record was never acted upon; a whole block is counted for it all
    the same. With no clean copy, releases may be missing: that is an error, never a smaller ε.
    """
    copies = [(name, parse(data)) for name, data in (("ledger", first), ("second copy", second)) if data is not None]
    clean = [(name, parsed) for name, parsed in copies if parsed.clean]
    if any((first, second)) and not any(data and looks_like_one(data) for data in (first, second)):
        raise NotALedger("the file is not a ledger: it does not begin as one")
    if not clean:
        trouble = "; ".join(f"{name}: {parsed.trouble}" for name, parsed in copies) or "no ledger there"
        raise LedgerError(
            f"{trouble}. No undamaged copy is left, so releases may be missing: restore one from a backup, "
            "or treat this run as non-private (epsilon = infinity)"
        )
    if any(not (a.good.startswith(b.good) or b.good.startswith(a.good)) for _, a in copies for _, b in copies):
        raise LedgerError("the two copies tell different histories; restore the true one from a backup")
    best = max((parsed for _, parsed in clean), key=lambda parsed: len(parsed.good))
    if any(len(parsed.good) > len(best.good) for _, parsed in copies):
        raise LedgerError(
            "both copies are damaged: one lost whole records, the other has a damaged end, so releases may be missing; "
            "restore one from a backup, or treat this run as non-private (epsilon = infinity)"
        )
    book = best.book
    assert book is not None  # it is clean
    notes, torn = [], {}
    for name, parsed in copies:
        if not parsed.clean:
            notes.append(f"{name}: {parsed.trouble}; the other copy is intact")
            if len(parsed.good) == len(best.good) and book.releases:
                kind = _last_kind(best.good, book)
                torn = {kind: min(book.next_block(kind), MAX_COUNT - book.counts[kind])}
        elif len(parsed.good) < len(best.good):
            notes.append(f"{name} is {len(best.good) - len(parsed.good)} bytes behind the other copy")
    if len(copies) < 2:
        notes.append("one of the two copies is missing")
    return Reconciled(book, best.good, torn, tuple(notes), missing=len(copies) < 2)


def looks_like_one(data: bytes) -> bool:
    """Whether a file was ever a ledger, damaged or not: its header says so, or some of its lines carry checksums."""
    return b'"ledger":' in data[:4096] or any(_LINE.match(line) for line in data[:65536].splitlines())


def _last_kind(good: bytes, book: Book) -> int:
    """The kind of the last reservation (the most recently defined one where there is none)."""
    for line in reversed(good.splitlines()):
        if line.startswith(b"["):
            return int(line[1:].split(b",", 1)[0])
    return len(book.releases) - 1
