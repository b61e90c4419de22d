"""What was probably meant: a short hint for a name that nothing answers to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'epsilon'?``, to be put behind an error's list of names; empty where nothing is near."""
    by_plain = {_plain(name): name for name in sorted(known)}
    near = difflib.get_close_matches(_plain(word), by_plain, n=2)
    return f" Did you mean {' or '.join(repr(by_plain[name]) for name in near)}?" if near else ""


def _plain(word: str) -> str:
    """Case and the choice between ``_`` and ``-`` are no mistakes worth telling apart."""
    return word.lower().replace("_", "-")
