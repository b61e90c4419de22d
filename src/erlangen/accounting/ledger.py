"""The write-ahead ledger: a release is on disk before its noise is used.

Releases are reserved in blocks: "64 more of event 0" is flushed to both copies, then 64 steps run from memory at the
cost of a subtraction each. A clean exit gives the rest back; a crash has spent it. Whatever happens to the process or
to one of the two files, the ledger never counts fewer releases than were made.

    with Ledger.create(folder / "ledger.jsonl", data=fingerprint) as ledger:
        release = Release(poisson(q, mechanism.event()), sensitivity=C, sigma_eff=σ, sample_rate=q)
        for batch in batches:
            ledger.spend(release)      # before the noisy gradient is used
            ...
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from erlangen.atomic import flush_folder, write_atomically

from . import ledger_format as fmt
from . import strict_json
from .ledger_format import Book, LedgerError, NotALedger, Release
from .ledger_lock import acquire, is_at, is_live

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = ["Book", "Ledger", "LedgerError", "NotALedger", "Release", "copy_path", "is_live", "read_ledger"]


def copy_path(path: str | os.PathLike[str]) -> Path:
    """Where the second copy of the ledger at `path` lives."""
    return Path(f"{os.fspath(path)}.copy")


def read_ledger(path: str | os.PathLike[str], single_copy: bool = False) -> Book:
    """What the ledger at `path` counts, without changing anything; damage is repaired in memory and noted.

    With one copy missing, records may be missing too: that is an error unless `single_copy` accepts it.
    """
    found = _find(Path(path), single_copy)
    if found.notes and is_live(Path(path)):  # between its two writes, perhaps; damage stays
        time.sleep(0.05)
        found = _find(Path(path), single_copy)
    return _with_torn(found)[0]


def passed_through(path: str | os.PathLike[str], head: Mapping[str, Any], single_copy: bool = False) -> bool:
    """Whether the ledger at `path` once stood at `head`."""
    return fmt.passed_through(_find(Path(path), single_copy).good, head)


class Ledger:
    """The only writer of a ledger. `create` starts one, `open` continues one (and repairs what a crash left)."""

    def __init__(self, path: Path, book: Book, lock: IO[str]) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.limit: int | None = None
        """Most steps to reserve from here on, over all kinds (a budget); reservations never run past it."""
        self.damage: tuple[str, ...] = ()
        """What `open` found damaged and repaired."""
        self._book = book
        self._lock = lock
        self._files = [os.open(p, os.O_WRONLY | os.O_APPEND | _CLOEXEC) for p in (path, copy_path(path))]
        self._pid = os.getpid()
        self._kinds = {strict_json.dumps(release.to_json()): kind for kind, release in enumerate(book.releases)}
        self._left: dict[int, int] = {}
        self._last: tuple[Release | DpEvent, int] | None = None
        self._state = "open"

    # --- life cycle ---

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        header: dict[str, Any] | None = None,
        *,
        data: str | None = None,
        run: str | None = None,
        unit: str = "record",
        block: int = 64,
        growth: float = 0.4,
    ) -> Ledger:
        """Start a ledger. `data` is the fingerprint of the private data set, `header` any further JSON facts.

        A crash spends at most one reservation: `block` steps, or `growth` × what was reserved before if that is more.
        """
        target = Path(path)
        record: dict[str, Any] = {**(header or {})}
        record.update(ledger=fmt.VERSION, run=run or record.get("run") or os.urandom(8).hex())
        record.update(data=data if data is not None else record.get("data"), unit=unit, block=block)
        record.update(growth=round(float(growth), 4), time=_now())
        line, digest = fmt.encode(record, "")
        book = fmt.advance(None, record, digest)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = acquire(target)
        except OSError as error:
            raise _cannot("create", target, error) from None
        try:
            _refuse_existing(target)
            write_atomically(copy_path(target), line)
            write_atomically(target, line)
            flush_folder(target.parent.resolve().parent)  # the run folder may be new, too
            return cls(target, book, lock)
        except OSError as error:
            lock.close()
            raise _cannot("create", target, error) from None
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], single_copy: bool = False) -> Ledger:
        """Continue a ledger: every reservation that was not given back counts, damage to one copy is repaired."""
        target = Path(path)
        try:
            if not target.parent.is_dir():
                raise LedgerError(f"no ledger at {target}: the folder does not exist")
            lock = acquire(target)
        except OSError as error:
            raise _cannot("open", target, error) from None
        try:
            found = _find(target, single_copy)
            _restore(target, found.good)
            book, line = _with_torn(found)
            ledger = cls(target, found.book, lock)
            ledger.damage = found.notes
            if line:
                ledger._write(line, book)
            ledger._append({"session": "resumed", "time": _now()})
            return ledger
        except OSError as error:
            lock.close()
            raise _cannot("open", target, error) from None
        except BaseException:
            lock.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was reserved and not used, and stop. Safe to call twice."""
        if self._state == "closed":
            return
        try:
            if self._state == "open" and self._pid == os.getpid():
                self.settle()
        finally:
            self._state = "closed"
            for file in self._files:
                os.close(file)
            self._lock.close()

    # --- releases ---

    def spend(self, release: Release | DpEvent, steps: int = 1) -> None:
        """Account `steps` releases *before* they happen. Returns only when they are on disk.

        Raises `LedgerError` if they cannot be written: then nothing may be released.
        """
        if steps < 1:
            raise LedgerError(f"cannot account {steps} releases; use a whole number above 0")
        self._check_usable()  # a forked child must not spend what its parent reserved
        kind = self._kind(release)
        left = self._left.get(kind, 0)
        if left < steps:
            self._reserve(kind, steps - left, grow=True)
            left = self._left[kind]
        self._left[kind] = left - steps
        if self.limit is not None:
            self.limit = max(0, self.limit - steps)

    def reserve(self, release: Release | DpEvent, steps: int) -> None:
        """Write `steps` releases ahead, to be used by later calls of `spend`."""
        if steps < 1:
            raise LedgerError(f"cannot reserve {steps} releases; use a whole number above 0")
        self._reserve(self._kind(release), steps, grow=False)

    def settle(self) -> None:
        """Give back what this session reserved and has not used."""
        unused = {str(kind): left for kind, left in sorted(self._left.items()) if left}
        if not self._book.settled:
            self._append({"unused": unused, "time": _now()})
        self._left.clear()

    # --- reading ---

    @property
    def book(self) -> Book:
        """What is on disk, reservations included: what a crash at this moment would count."""
        return self._book

    def pairs(self) -> list[tuple[DpEvent, int]]:
        """What has been released so far, as (event, count): the reservations still unused are not in it."""
        return [
            (release.event, count - self._left.get(kind, 0))
            for kind, (release, count) in enumerate(zip(self._book.releases, self._book.counts))
            if count - self._left.get(kind, 0)
        ]

    @property
    def steps(self) -> int:
        """Number of releases made so far."""
        return self._book.steps - sum(self._left.values())

    @property
    def head(self) -> dict[str, Any]:
        """Where the ledger stands; store it in checkpoints, and check it with `contains` on resume."""
        return self._book.head

    def contains(self, head: dict[str, Any]) -> bool:
        """Whether this ledger passed through `head`: a checkpoint from another run or a rolled-back ledger fails."""
        return fmt.passed_through(strict_json.read_bytes(self.path, "ledger"), head)

    def require_in_place(self) -> None:
        """Both files are still those that are written to. What goes into a file that was deleted, or replaced by another run's or
        by a copy of itself, is on no disk when somebody reads it: nothing more may be released."""
        if self._state == "closed":
            return
        for path, file in zip((self.path, copy_path(self.path)), self._files):
            if not is_at(path, file):
                self._state = "gone from its place"
                raise LedgerError(
                    f"{path} was deleted or replaced while this run was writing it: what was released since is on no ledger there. "
                    "Nothing more is released; restore it from a backup, or treat what the run has left as not private "
                    "(epsilon = infinity)"
                )

    # --- writing ---

    def _kind(self, release: Release | DpEvent) -> int:
        if self._last is not None and self._last[0] is release:
            return self._last[1]
        facts = (release if isinstance(release, Release) else Release(release)).to_json()
        key = strict_json.dumps(facts)
        kind = self._kinds.get(key, len(self._kinds))
        if kind == len(self._kinds):
            self._append({"define": kind, **facts, "time": _now()})
            self._kinds[key] = kind
        self._last = (release, kind)
        return kind

    def _reserve(self, kind: int, needed: int, grow: bool) -> None:
        block = needed
        if grow:
            block = max(needed, self._book.next_block(kind))
            if self.limit is not None:
                block = max(needed, min(block, self.limit - sum(self._left.values())))
        self._append([kind, block])
        self._left[kind] = self._left.get(kind, 0) + block

    def _check_usable(self) -> None:
        if self._state != "open" or self._pid != os.getpid():
            cause = "belongs to another process" if self._pid != os.getpid() else f"is {self._state}"
            raise LedgerError(f"ledger {self.path} {cause}; open it again before releasing anything")

    def _append(self, record: dict[str, Any] | list[int]) -> None:
        line, digest = fmt.encode(record, self._book.checksum)
        self._write(line, fmt.advance(self._book, record, digest))

    def _write(self, line: bytes, book: Book) -> None:
        self._check_usable()
        try:
            for file in self._files:
                _write_all(file, line)
                os.fsync(file)
            self.require_in_place()
        except OSError as error:
            # What reached the disk is unknown: the next `open` finds out, and counts in doubt.
            self._state = "broken by a failed write"
            raise _cannot("write", self.path, error) from None
        except BaseException:  # Ctrl-C between the two copies: nothing may be appended to what is now uneven
            self._state = "broken by an interrupted write"
            raise
        self._book = book


# --- files ---------------------------------------------------------------------------------------------------------

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def _find(path: Path, single_copy: bool) -> fmt.Reconciled:
    """Both copies, reconciled."""
    first, second = (strict_json.read_bytes(p, "ledger") if p.exists() else None for p in (path, copy_path(path)))
    if first is None and second is None:
        raise NotALedger(f"no ledger at {path}; name the folder of a run, or its ledger.jsonl")
    try:
        found = fmt.reconcile(first, second)
    except LedgerError as error:
        raise type(error)(f"{path}: {error}") from None
    if found.missing and not single_copy:
        raise LedgerError(
            f"of {path} and {copy_path(path).name} only one exists; the other may have held later releases: "
            "restore it, or say that one copy is enough (single_copy=True, --single-copy)"
        )
    return found


def _with_torn(found: fmt.Reconciled) -> tuple[Book, bytes]:
    """The book including what is counted for a torn record, and the line that says so."""
    if not found.notes:
        return found.book, b""
    counted = {str(kind): steps for kind, steps in found.torn.items()}
    record = {"repair": "; ".join(found.notes)[:300], "counted": counted, "time": _now()}
    line, digest = fmt.encode(record, found.book.checksum)
    return fmt.advance(found.book, record, digest), line


def _restore(path: Path, good: bytes) -> None:
    """Give both copies the same good bytes; what they held before is kept beside them."""
    for target in (path, copy_path(path)):
        if target.exists():
            if target.read_bytes() == good:
                continue
            stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")
            with contextlib.suppress(OSError):  # evidence, not needed for the repair
                os.link(target, f"{target}.damaged-{stamp}")
        write_atomically(target, good)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise LedgerError(f"a ledger exists at {path}; continue it with Ledger.open, or use another folder")
    second = copy_path(path)
    if second.exists() and fmt.parse(second.read_bytes()).good.count(b"\n") > 1:
        raise LedgerError(f"{second} holds the releases of a ledger that is gone; continue it with Ledger.open({path})")


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _cannot(verb: str, path: Path, error: OSError) -> LedgerError:
    cause = error.strerror or str(error)
    return LedgerError(
        f"cannot {verb} the ledger {path}: {cause}. Nothing may be released without it: free space or fix permissions, "
        "then resume the run"
    )


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

