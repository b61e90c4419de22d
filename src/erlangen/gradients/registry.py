"""Which rule serves which layer: one small file per family in `rules/`, registered by decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

#: a rule runs the layer with detached parameters and tells the tape how rows contribute to their gradients
Rule = Callable[..., Any]

_RULES: dict[type[nn.Module] | str, Rule] = {}


def rule(*layers: type[nn.Module] | str) -> Callable[[Rule], Rule]:
    """Register ``fn(module, tape, *args, **kwargs) -> output`` for exactly these layer types.

    A layer of a package that may not be installed is named by its path, ``"package.module.Class"``.
    """

    def add(fn: Rule) -> Rule:
        for layer in layers:
            _RULES[layer] = fn
        return fn

    return add


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of the module's type, or of the base type whose ``forward`` it inherits unchanged.

    Weights that are computed from parameters (parametrizations) are fine: the tape pulls their gradients back.
    """
    from erlangen.gradients import rules  # noqa: F401  (registers the families)

    for base in type(module).__mro__:
        found = _RULES.get(base) or _RULES.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found if type(module).forward is base.forward else None  # type: ignore[attr-defined]
    return None


def registered_by_name() -> dict[str, Rule]:
    """Rules of layers whose package may not be installed, by the path of the layer."""
    from erlangen.gradients import rules  # noqa: F401

    return {layer: fn for layer, fn in _RULES.items() if isinstance(layer, str)}


def registered() -> dict[type[nn.Module], Rule]:
    """All rules, for tests and audits that must see every one, also those of layers nobody has used yet."""
    import erlangen.circulant
    import erlangen.equivariant  # noqa: F401
    from erlangen.gradients import rules  # noqa: F401

    return {layer: fn for layer, fn in _RULES.items() if isinstance(layer, type)}
