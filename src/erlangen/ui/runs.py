"""Runs below one folder, as the page sees them. Everything is read, nothing is written.

A run has a *name*: its path below the folder. The page asks for runs by name, and a name is only ever compared with those that
were found: no text from a request becomes a path.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from erlangen.accounting import LedgerError, epsilon, read_ledger
from erlangen.accounting.compose import VALIDATION_NAME
from erlangen.accounting.ledger import copy_path, is_live
from erlangen.accounting.words import in_json
from erlangen.report.folder import Run, evaluated, history, read
from erlangen.training.config import TrainConfig

#: how far below the folder runs are looked for, and how many are shown
DEPTH, MOST = 4, 2000
#: seconds that one listing may spend on recomputing certificates; the others follow with the next
PATIENCE = 1.0
#: files whose change makes a run worth reading again
_WATCHED = (
    "config.json", "summary.json", "certificate.json", "metrics.jsonl", "ledger.jsonl", "ledger.jsonl.copy",
    VALIDATION_NAME, copy_path(VALIDATION_NAME).name,
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One run now. ``epsilon`` is None while it is unknown (the certificate is still to be recomputed), ∞ if unbelievable.

    Of a run that has not finished, ``epsilon`` is that of its ledger: what is reserved on disk, never less than what was used.
    """

    name: str
    state: str  # running, finished, interrupted, unreadable
    config: TrainConfig | None
    history: tuple[dict[str, Any], ...] = ()
    epsilon: float | None = None
    delta: float | None = None
    accuracy: float | None = None
    steps: int = 0
    planned: int = 0
    run: Run | None = None
    problem: str = ""

    def as_run(self) -> Run | None:
        """For the figures of `erlangen.report`; an unfinished run has no certificate and no predictions."""
        if self.run is not None or self.config is None:
            return self.run
        guarantee = {"delta": self.delta or 0.0, "epsilon": {"pld": "inf" if self.epsilon is None else self.epsilon}}
        return Run(
            Path(self.name), self.config, {"guarantee": guarantee, "data": {}}, None, (), self.history, None, None
        )

    def row(self) -> dict[str, Any]:
        """As JSON; ∞ is "inf"."""
        mechanism = None if self.config is None else self.config.mechanism
        eps = None if self.epsilon is None else in_json(self.epsilon)
        return {
            "name": self.name, "state": self.state, "epsilon": eps, "delta": self.delta, "accuracy": _finite(self.accuracy),
            "steps": self.steps, "planned": self.planned, "mechanism": mechanism, "problem": self.problem,
            "model": None if self.config is None else self.config.model,
            "data": None if self.config is None else Path(self.config.data).name,
            "checked": self.run is not None,
        }  # fmt: skip


class Runs:
    """The runs below ``root``. A run is read again only when its files have changed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).resolve()
        self._known: dict[str, tuple[Any, bool, bool, Seen]] = {}
        self._lock = threading.Lock()  # one request reads at a time

    def names(self) -> list[str]:
        return [str(path.relative_to(self.root)) for path in sorted(_folders(self.root))]

    def listing(self) -> list[Seen]:
        """Every run; certificates are recomputed for `PATIENCE` seconds, the rest stay unknown until the next call."""
        until = time.monotonic() + PATIENCE
        with self._lock:
            return [self._look(name, check=time.monotonic() < until) for name in self.names()]

    def one(self, name: str) -> Seen | None:
        """The run of that name in full; None if there is none."""
        with self._lock:
            return self._look(name, check=True) if name in self.names() else None

    def _look(self, name: str, check: bool) -> Seen:
        folder = self.root / name
        stamp, known = _stamp(folder), self._known.get(name)
        same = known is not None and known[0] == stamp
        finished = known[1] if known is not None and same else _is_finished(folder)
        live = not finished and is_live(folder / "ledger.jsonl")
        if known is not None and same and known[2] == live and (known[3].epsilon is not None or not check):
            return known[3]
        seen = look(folder, name, live, check)
        self._known[name] = (stamp, finished, live, seen)
        return seen


def look(folder: Path, name: str, live: bool, check: bool = True) -> Seen:
    """Read one run. Whatever cannot be read is said, and has no finite ε."""
    try:
        if _is_finished(folder):
            return _finished(folder, name, check)
        return _unfinished(folder, name, "running" if live else "interrupted")
    except (LedgerError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Seen(name, "unreadable", None, epsilon=math.inf, problem=str(error) or type(error).__name__)


def _finished(folder: Path, name: str, check: bool) -> Seen:
    if not check:
        config = TrainConfig.from_file(folder / "config.json")
        summary = json.loads((folder / "summary.json").read_text())
        seen = Seen(name, "finished", config, delta=float(summary["guarantee"]["delta"]))
        seen = replace(seen, accuracy=summary.get("test", {}).get("test_accuracy"))
        return replace(seen, steps=int(summary["steps"]), planned=int(summary["planned_steps"]))
    run = read(folder)
    steps, planned = int(run.summary.get("steps", 0)), int(run.summary.get("planned_steps", run.config.steps))
    problem = f"the certificate does not hold: {run.problems[0]}" if run.problems else ""
    return Seen(
        name, "finished", run.config, run.history, run.spent, run.delta, run.accuracy, steps, planned, run, problem
    )


def _unfinished(folder: Path, name: str, state: str) -> Seen:
    config = TrainConfig.from_file(folder / "config.json")
    rows = history(folder)  # a torn last line is left out
    last = rows[-1] if rows else {}
    accuracy = last.get("test_accuracy")
    seen = Seen(name, state, config, rows, delta=config.delta, planned=config.steps, steps=int(last.get("step", 0)))
    seen = replace(seen, accuracy=float(accuracy) if isinstance(accuracy, (int, float)) else None)
    if config.delta is None:
        return replace(seen, epsilon=math.inf, problem="config.json does not say δ")
    return replace(seen, epsilon=epsilon(read_ledger(folder / "ledger.jsonl").pairs(), config.delta))


def _finite(value: float | None) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _is_finished(folder: Path) -> bool:
    """A summary, and no evaluation after it: a run that is set back and resumed evaluates at earlier steps, or at later ones.

    Times of files do not say it: whoever copies a folder makes them new, in any order.
    """
    try:
        done = int(json.loads((folder / "summary.json").read_text())["steps"])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # `read` says what is wrong with it
    steps = evaluated(folder)
    return not steps or steps[-1] == max(steps) <= done


def _stamp(folder: Path) -> tuple[tuple[int, int] | None, ...]:
    def of(path: Path) -> tuple[int, int] | None:
        try:
            facts = path.stat()
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_size

    return tuple(of(folder / name) for name in _WATCHED)


def _folders(root: Path) -> Iterator[Path]:
    """Folders that hold a run. Links are not followed: nothing outside the folder is shown."""
    found = 0
    for place, folders, files in os.walk(root, followlinks=False):
        path = Path(place)
        if "config.json" in files and ("ledger.jsonl" in files or copy_path("ledger.jsonl").name in files):
            folders.clear()
            found += 1
            yield path
            if found == MOST:
                return
        elif len(path.relative_to(root).parts) >= DEPTH:
            folders.clear()
        else:
            folders[:] = sorted(f for f in folders if not f.startswith("."))
