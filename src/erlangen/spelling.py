"""Names that nothing answers to: refused, with what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def hint(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'epsilon'?``, to be put behind an error's list of names; empty where nothing is near."""
    by_plain = {_plain(name): name for name in sorted(known)}
    near = difflib.get_close_matches(_plain(word), by_plain, n=2)
    return f" Did you mean {' or '.join(repr(by_plain[name]) for name in near)}?" if near else ""


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str], error: type[ValueError] = ValueError) -> None:
    """Refuse options of ``what`` that would silently do nothing."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        meant = "".join(hint(name, known) for name in unknown)
        raise error(f"{what} has no option {unknown}; it takes {', '.join(known) or 'none'}.{meant}")


def _plain(word: str) -> str:
    """Case and the choice between ``_`` and ``-`` are no mistakes worth telling apart."""
    return word.lower().replace("_", "-")
