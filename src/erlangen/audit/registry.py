"""What the library defines, found by class: so that a kind of thing that nobody registered does not escape the audits."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable

import erlangen

#: broken specimens and probes live here
OURS, NOT_OURS = "erlangen.", "erlangen.audit."
#: packages whose modules are imported before looking: the ones that hold mechanisms, rules, samplers, sources and layers
SEARCHED = ("gradients", "lipschitz", "mechanisms", "sampling", "training")


def load_all() -> None:
    """Import every module in which something could be defined or registered."""
    for package in SEARCHED:
        found = importlib.import_module(f"erlangen.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"erlangen.{package}."):
            importlib.import_module(module.name)
    for module in pkgutil.iter_modules(erlangen.__path__, OURS):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def defined(base: type) -> list[type]:
    """Concrete subclasses of ``base`` that the library defines, in the order of their names."""
    stack, found = [base], set()
    while stack:
        kind = stack.pop()
        stack.extend(kind.__subclasses__())
        ours = kind.__module__.startswith(OURS) and not kind.__module__.startswith(NOT_OURS)
        if ours and not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
            found.add(kind)
    return sorted(found, key=lambda kind: kind.__qualname__)


def missing(base: type, audited: Iterable[type]) -> list[type]:
    """Those that no audit has seen."""
    seen = set(audited)
    return [kind for kind in defined(base) if kind not in seen]
