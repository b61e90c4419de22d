"""Exponential moving average of the weights, with warm-up. Post-processing of private weights: free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """θ̄ ← d_t·θ̄ + (1 − d_t)·θ with d_t = min(decay, (1 + t)/(1 + h + t)): while the decay has not taken over, the average is
    mostly of the last h-th part of the steps, so that it forgets the start."""

    def __init__(self, module: nn.Module, decay: float = 0.999, h: float = 9.0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; an average needs 0 ≤ decay < 1")
        if h <= 0:
            raise ValueError(f"h is {h}; an average over the last h-th part of the steps needs h > 0")
        self.module, self.decay, self.h, self.updates = module, decay, h, 0
        self.average = {n: p.detach().clone() for n, p in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (1 + self.h + self.updates))
        for name, value in self.module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - decay)
            else:
                self.average[name].copy_(value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module holds the average inside the block, and its own weights again after it."""
        own = {n: p.detach().clone() for n, p in self.module.state_dict().items()}
        self.module.load_state_dict(self.average)
        try:
            yield
        finally:
            self.module.load_state_dict(own)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        average: Mapping[str, Tensor] = state["average"]
        for name, value in average.items():
            self.average[name].copy_(value)
