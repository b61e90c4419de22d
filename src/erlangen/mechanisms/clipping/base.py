"""What a clipping rule promises: Σ_groups (w_i·‖g_i‖)² ≤ C² for every sample, whatever the rounding."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from erlangen.spelling import hint, refuse_unknown

_RULES: dict[str, type[ClippingRule]] = {}

#: the least bound, and the least constant of a rule: squares of shorter norms leave float32, which would measure them as zero
LEAST = 1e-12


@dataclass(frozen=True)
class SideQuery:
    """A scalar that the rule asks of the batch beside the gradient: Σ_i values_i with the given sensitivity and noise."""

    values: Tensor
    sensitivity: float
    std: float


def require_measurable(name: str, value: float) -> None:
    """Refuse a constant that norms in float32 cannot be compared with."""
    if value < LEAST:
        raise ValueError(f"{name} is {value:g}; norms that short cannot be measured in float32: give at least {LEAST:g}")


class ClippingRule(ABC):
    """Weights w_i with ‖(w_i g_i)‖ ≤ bound. One rule may clip several groups of parameters separately."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    @property
    def bound(self) -> float:
        """C; it may move between two steps, to what it could have been from the beginning."""
        return self._bound

    @bound.setter
    def bound(self, bound: float) -> None:
        if not (isinstance(bound, (int, float)) and math.isfinite(bound) and bound > 0):
            raise ValueError(f"max_grad_norm is {bound!r}; the clipping bound C must be a positive, finite number")
        require_measurable("max_grad_norm", bound)
        self._bound = float(bound)

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm that one owner can add to the sum (add/remove)."""
        return self.bound

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """The parameters that are clipped together. Default: all of them."""
        return [list(names)]

    @abstractmethod
    def weights(self, norms: Tensor) -> Tensor:
        """[groups, n] norms → [groups, n] weights."""

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """The noise multiplier of the gradient such that gradient and side queries together cost ``noise_multiplier``."""
        return noise_multiplier

    def side_query(self, norms: Tensor) -> SideQuery | None:
        """What else is asked of the batch; None for rules that do not adapt."""
        return None

    def update(self, noisy_total: float, expected_batch: float) -> None:
        """Adapt to the *private* answer of the side query."""

    def prepare(self, noise_multiplier: float, expected_batch: float) -> None:
        """Settle what depends on the run."""

    def safe_bound(self, norms: Tensor, bound: float | None = None) -> float:
        """C less what rounding of norms, weights and products in this precision can add back."""
        return (self.bound if bound is None else bound) * (1.0 - 32 * torch.finfo(norms.dtype).eps)

    def describe(self) -> dict[str, Any]:
        """What a certificate says of the rule beside its name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self.bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bound = state["bound"]


def register_clipping(name: str) -> Callable[[type[ClippingRule]], type[ClippingRule]]:
    """Make a rule known by name; audits find every registered rule."""

    def add(rule: type[ClippingRule]) -> type[ClippingRule]:
        _RULES[name] = rule
        return rule

    return add


def clipping_rules() -> dict[str, type[ClippingRule]]:
    return dict(_RULES)


def make_clipping(clipping: str | ClippingRule, bound: float | Sequence[float] | None, **options: Any) -> ClippingRule:
    """A rule from its name and the bound C, or the rule itself."""
    if isinstance(clipping, ClippingRule):
        return clipping
    if clipping not in _RULES:
        raise ValueError(
            f"clipping is {clipping!r}; choose one of {', '.join(sorted(_RULES))}, or pass a ClippingRule.{hint(clipping, _RULES)}"
        )
    if bound is None:
        raise ValueError("max_grad_norm is missing: give the clipping bound C")
    taken = list(inspect.signature(_RULES[clipping]).parameters.values())
    if not any(p.kind is p.VAR_KEYWORD for p in taken):
        refuse_unknown(f"clipping {clipping!r}", options, [p.name for p in taken[1:]])
    return _RULES[clipping](bound, **options)  # type: ignore[arg-type]
