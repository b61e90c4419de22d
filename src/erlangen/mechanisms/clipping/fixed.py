"""Rules whose bound never moves: flat, per-layer, AUTO-S, PSAC. Each has sensitivity C."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from erlangen.mechanisms.clipping.base import ClippingRule, register_clipping, require_measurable

#: what per-layer clipping clips by itself, and how a certificate says it
WORDS = {"tensors": "every parameter tensor by itself", "layers": "every layer by itself, its weight and bias together"}
GROUPINGS = tuple(WORDS)


@register_clipping("flat")
class Flat(ClippingRule):
    """w_i = min(1, C/‖g_i‖) (Abadi et al. 2016)."""

    def weights(self, norms: Tensor) -> Tensor:
        return (self.safe_bound(norms) / norms).clamp(max=1.0)


def layer_of(name: str) -> str:
    """The module that owns a parameter: ``conv1.weight`` and ``conv1.bias`` are one layer, ``conv1``."""
    return name.rpartition(".")[0]


@register_clipping("per-layer")
class PerLayer(ClippingRule):
    """Each group l has its own C_l, with Σ C_l² = C². One number C is shared equally: C_l = C/√L.

    ``groups="tensors"`` (the default) clips every parameter by itself; ``groups="layers"`` clips the weight and the bias
    of one module together, as papers count layers. Both have sensitivity C. Bounds that were given one by one keep their
    proportions where C moves (a schedule, a state that is loaded).
    """

    def __init__(self, bound: float | Sequence[float], groups: str | None = None) -> None:
        if groups is not None and groups not in GROUPINGS:
            raise ValueError(f"groups is {groups!r}; per-layer clipping clips {' or '.join(map(repr, GROUPINGS))}")
        self.bounds = None if isinstance(bound, (int, float)) else [float(b) for b in bound]
        if self.bounds is not None and not all(math.isfinite(b) and b > 0 for b in self.bounds):
            raise ValueError(f"max_grad_norm holds {self.bounds}; every layer's bound must be positive and finite")
        if self.bounds is not None:
            require_measurable("max_grad_norm of a layer", min(self.bounds, default=1.0))
        super().__init__(bound if isinstance(bound, (int, float)) else math.hypot(*self.bounds))  # type: ignore[misc]
        #: None where nobody chose: a mechanism may have a habit of its own, and "tensors" is ours
        self.grouping = groups

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        together: dict[str, list[str]] = {}
        for name in names:
            together.setdefault(layer_of(name) if self.grouping == "layers" else name, []).append(name)
        found = list(together.values())
        if self.bounds is not None and len(self.bounds) != len(found):
            what = "layers" if self.grouping == "layers" else "parameters"
            raise ValueError(f"max_grad_norm has {len(self.bounds)} bounds for {len(found)} {what}: {list(together)}")
        return found

    def each(self, count: int) -> list[float]:
        """C_l of ``count`` groups at the C of this moment."""
        if self.bounds is None:
            return [self.bound / math.sqrt(count)] * count
        moved = self.bound / math.hypot(*self.bounds)
        return [bound * moved for bound in self.bounds]

    def weights(self, norms: Tensor) -> Tensor:
        each = self.each(norms.shape[0])
        bounds = torch.tensor(each, dtype=norms.dtype, device=norms.device)[:, None]
        return (bounds * self.safe_bound(norms, 1.0) / norms).clamp(max=1.0)

    def describe(self) -> dict[str, Any]:
        return {"clipped": WORDS[self.grouping or "tensors"]}


@register_clipping("auto-s")
class AutoS(ClippingRule):
    """w_i = C/(‖g_i‖ + γ): every gradient is normalised, small ones a little less (Bu et al. 2023)."""

    def __init__(self, bound: float, gamma: float = 0.01) -> None:
        super().__init__(bound)
        if not 0 < gamma < math.inf:
            raise ValueError(f"gamma is {gamma}; AUTO-S needs a finite γ > 0")
        require_measurable("gamma", gamma)
        self.gamma = gamma

    def weights(self, norms: Tensor) -> Tensor:
        return self.safe_bound(norms) / (norms + self.gamma)


@register_clipping("psac")
class PSAC(ClippingRule):
    """w_i = C/(‖g_i‖ + r/(‖g_i‖ + r)): small gradients are not blown up (Xia et al. 2023)."""

    def __init__(self, bound: float, r: float = 0.1) -> None:
        super().__init__(bound)
        if not 0 < r < math.inf:
            raise ValueError(f"r is {r}; PSAC needs a finite r > 0")
        require_measurable("r", r)
        self.r = r

    def weights(self, norms: Tensor) -> Tensor:
        return self.safe_bound(norms) / (norms + self.r / (norms + self.r))
