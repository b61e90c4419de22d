"""Denoisers of private gradients. Post-processing: they see released values and the known noise, so they are free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Variances = Mapping[str, Tensor | float]


class JamesStein:
    """Positive-part James–Stein shrinkage of each parameter's gradient towards a reference that is private already.

    With noise variance v per coordinate and o = g − ref:  ĝ = ref + max(0, 1 − (d−2)·v/‖o‖²)·o. Where v differs between
    coordinates, o is measured in units of its noise. ``memory`` makes the reference a moving average of past outputs
    (0: shrink towards zero). For d > 2 the expected squared error is never larger than that of g itself.
    """

    def __init__(self, memory: float = 0.0) -> None:
        if not 0 <= memory < 1:
            raise ValueError(f"memory is {memory}; the moving average needs 0 ≤ memory < 1")
        self.memory = memory
        self._reference: dict[str, Tensor] = {}

    def __call__(self, gradients: Mapping[str, Tensor], variances: Variances) -> dict[str, Tensor]:
        out = {}
        for name, g in gradients.items():
            reference = self._reference.get(name, torch.zeros_like(g))
            offset = g - reference
            energy = (offset.square() / variances[name]).sum()
            shrink = torch.where(energy > 0, (1.0 - max(g.numel() - 2, 0) / energy).clamp(min=0.0), 1.0)
            out[name] = reference + shrink * offset
            if self.memory:
                self._reference[name] = self.memory * reference + (1 - self.memory) * out[name]
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"reference": dict(self._reference)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference = dict(state["reference"])
