"""Which rule serves which layer: one small file per family in `rules/`, registered by decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

#: a rule runs the layer with detached parameters and tells the tape how rows contribute to their gradients
Rule = Callable[..., Any]

_RULES: dict[type[nn.Module], Rule] = {}


def rule(*layers: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register ``fn(module, tape, *args, **kwargs) -> output`` for exactly these layer types."""

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
        if base in _RULES:
            return _RULES[base] if type(module).forward is base.forward else None
    return None


def registered() -> dict[type[nn.Module], Rule]:
    """All rules, for tests and audits that must see every one, also those of layers nobody has used yet."""
    import erlangen.circulant
    import erlangen.equivariant
    from erlangen.gradients import rules  # noqa: F401

    return dict(_RULES)
