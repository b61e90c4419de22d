"""Optional packages: a command that lacks one says which, and how to get it."""

from __future__ import annotations

from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an optional extra is not installed."""


def require(what: str, extra: str, *packages: str) -> None:
    """Raise unless every package can be imported."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise MissingExtra(f"{what} needs {names}, which this Python does not have: pip install 'erlangen[{extra}]'")
