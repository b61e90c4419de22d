"""Results of finished tasks in a file, so that a sweep that was stopped goes on where it was.

One line for each task, written when the task is done. A line counts only if it was written by the very same sources: a result of
older code says nothing about this one. A line that was cut short is no line.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import erlangen
from erlangen.audit.verdict import Finding

#: no audit imports these
SHOWN_ONLY = ("cli", "deploy", "experiments", "report", "ui")
#: only tasks of the zoo see the broken specimens; nothing but the last page depends on how it is written
ZOO, PAGE = ("audit/broken/", "audit/zoo.py"), "audit/markdown.py"


class Named(Protocol):
    @property
    def part(self) -> str: ...

    @property
    def key(self) -> str: ...


@lru_cache(maxsize=2)
def fingerprint(with_zoo: bool) -> str:
    """Of all sources on which an audit's result can depend, and of the version of PyTorch."""
    import torch

    root = Path(erlangen.__file__).parent
    total = hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] in SHOWN_ONLY or name == PAGE or (name.startswith(ZOO) and not with_zoo):
            continue
        total.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


class Kept:
    """Finished tasks by name; ``None`` as path keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._done: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self._done[f"{entry['source']} {entry['task']}"] = entry["result"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    continue

    def __contains__(self, task: Named) -> bool:
        return self._name(task) in self._done

    def __getitem__(self, task: Named) -> Any:
        return decoded(self._done[self._name(task)])

    def add(self, task: Named, result: Any, seconds: float) -> None:
        """On disk when this returns."""
        self._done[self._name(task)] = encoded(result)
        if self.path is None:
            return
        entry = {"source": _source(task), "task": task.key, "seconds": round(seconds, 2), "result": encoded(result)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _name(self, task: Named) -> str:
        return f"{_source(task)} {task.key}"


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _source(task: Named) -> str:
    return fingerprint(with_zoo=task.part == "zoo")


def encoded(result: Any) -> Any:
    """Findings as objects of JSON; infinities as Python's JSON writes them."""
    if isinstance(result, Finding):
        return {"finding": asdict(result)}
    return [encoded(r) for r in result] if isinstance(result, list) else result


def decoded(result: Any) -> Any:
    if isinstance(result, dict) and set(result) == {"finding"}:
        return Finding(**result["finding"])
    return [decoded(r) for r in result] if isinstance(result, list) else result
