"""What moves on the terminal, one at a time: two write over each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Shown(Protocol):
    """Something on the terminal that moves, as rich's ``Status``."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


#: what a command shows while the library works
waiting: list[Shown] = []


@contextmanager
def alone() -> Iterator[None]:
    """A bar inside has the terminal to itself: what waits is taken off it meanwhile."""
    for shown in waiting:
        shown.stop()
    try:
        yield
    finally:
        for shown in waiting:
            shown.start()
