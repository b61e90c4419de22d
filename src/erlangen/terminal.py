"""What moves on the terminal, one at a time: two write over each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

#: in `bars`: how many are done, of how many
COUNT = "count"


class Shown(Protocol):
    """Something on the terminal that moves, as rich's ``Status``."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def bars(label: str, *between: str | ProgressColumn, quiet: bool = False, transient: bool = False) -> Progress:
    """Bars on stderr, one for each task: a label, the bar, what is ``between`` (texts, `COUNT` or columns), and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    def column(what: str | ProgressColumn) -> ProgressColumn:
        return MofNCompleteColumn() if what == COUNT else TextColumn(what) if isinstance(what, str) else what

    columns = (TextColumn(label), BarColumn(), *map(column, between), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), disable=quiet, transient=transient)


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
