"""Adam whose second moment does not count the noise (in the spirit of DP-AdamBC, Tang et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamBC(Optimizer):
    """Adam with v̂ − s², floored at γ², in place of v̂: the private noise of known variance s² inflates the second moment.

    The engine calls `set_noise_variance` before each step with the variance of the noise on the *mean* gradient. Without
    it this is plain Adam with a floor. Post-processing: free.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), floor: float = 1e-8
    ) -> None:
        if lr <= 0 or floor <= 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"AdamBC needs lr > 0, floor > 0 and betas in [0, 1), got {lr}, {floor}, {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor})
        self._variance: Mapping[Tensor, Tensor | float] = {}

    def set_noise_variance(self, variance: Mapping[Tensor, Tensor | float]) -> None:
        self._variance = variance

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        state["mean"].lerp_(p.grad, 1 - b1)
        state["square"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        mean = state["mean"] / (1 - b1 ** state["step"])
        signal = state["square"] / (1 - b2 ** state["step"]) - self._variance.get(p, 0.0)
        p.sub_(group["lr"] * mean / signal.clamp(min=group["floor"]).sqrt())


def optimizers() -> dict[str, Callable[..., Optimizer]]:
    """Optimizers by name, for configurations."""
    return {
        "sgd": lambda params, lr, momentum, weight_decay: torch.optim.SGD(
            params, lr, momentum=momentum, weight_decay=weight_decay
        ),
        "adam": lambda params, lr, momentum, weight_decay: torch.optim.Adam(params, lr, weight_decay=weight_decay),
        "adam-bc": lambda params, lr, momentum, weight_decay: AdamBC(params, lr, floor=1e-6),
    }
