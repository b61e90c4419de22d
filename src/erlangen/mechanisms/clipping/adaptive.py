"""Adaptive clipping to a quantile of the norms, paid for (Andrew et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from erlangen.mechanisms.clipping.base import LEAST, ClippingRule, SideQuery, register_clipping


@register_clipping("adaptive")
class AdaptiveQuantile(ClippingRule):
    """C ← C·exp(−η(b̃ − γ)), b̃ the noisy fraction of samples with ‖g_i‖ ≤ C.

    The count is released as Σ(1{‖g_i‖ ≤ C} − ½), sensitivity ½, with noise σ_b. The gradient's own multiplier becomes
    σ_g = (σ⁻² − (2σ_b)⁻²)^(−½), so that both releases together are one Gaussian of multiplier σ.
    """

    def __init__(self, bound: float, quantile: float = 0.5, rate: float = 0.2, count_std: float | None = None) -> None:
        super().__init__(bound)
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; it must lie strictly between 0 and 1")
        if not rate > 0:
            raise ValueError(f"rate is {rate}; the adaptation rate η must be positive")
        self.quantile, self.rate, self.count_std, self._given_std = quantile, rate, count_std, count_std

    def prepare(self, noise_multiplier: float, expected_batch: float) -> None:
        if self._given_std is None:  # settled anew whenever σ is: calibration starts from another one
            self.count_std = max(expected_batch / 20.0, 5.0 * noise_multiplier)
        self._room(noise_multiplier)

    def weights(self, norms: Tensor) -> Tensor:
        return (self.safe_bound(norms) / norms).clamp(max=1.0)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        if noise_multiplier == 0:
            return 0.0
        return (noise_multiplier**-2 - (2 * self._room(noise_multiplier)) ** -2) ** -0.5

    def _room(self, noise_multiplier: float) -> float:
        """The noise of the count, which has to leave the gradient a part of a step's budget; σ may move between steps."""
        assert self.count_std is not None, "prepare() comes first"
        if not 2 * self.count_std > noise_multiplier:
            raise ValueError(
                f"count_std is {self.count_std} but the noise multiplier is {noise_multiplier}: the count alone would "
                f"cost more than the budget of a step. Give count_std > {noise_multiplier / 2:g}."
            )
        return self.count_std

    def side_query(self, norms: Tensor) -> SideQuery:
        assert self.count_std is not None, "prepare() comes first"
        return SideQuery((norms[0] <= self.bound).to(torch.float64) - 0.5, 0.5, self.count_std)

    def update(self, noisy_total: float, expected_batch: float) -> None:
        fraction = noisy_total / expected_batch + 0.5
        moved = self.bound * math.exp(-self.rate * (min(max(fraction, 0.0), 1.0) - self.quantile))
        self.bound = min(max(moved, LEAST), 1.0 / LEAST)  # where no gradient follows, the bound would leave float32

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self.bound, "count_std": self.count_std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bound, self.count_std = float(state["bound"]), state["count_std"]
