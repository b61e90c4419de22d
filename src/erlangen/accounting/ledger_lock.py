"""One writer at a time, in one place: the lock of a ledger, and whether its files are still where they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from .ledger_format import LedgerError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


def acquire(path: Path) -> IO[str]:
    """An exclusive lock that the system releases when the process ends, however it ends."""
    lock = open(f"{path}.lock", "a", encoding="utf-8")  # noqa: SIM115 (held until close)
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise LedgerError(f"another process is writing {path}; wait for it, or use another run folder") from None
    return lock


def is_live(path: Path) -> bool:
    """Whether a process holds the ledger's lock at this moment."""
    if fcntl is None:
        return False
    try:
        with open(f"{path}.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
