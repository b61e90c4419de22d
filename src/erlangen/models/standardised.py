"""Weight standardisation: convolutions whose filters have mean 0 and variance 1/fan_in, whatever their parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def standardise(weight: Tensor, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """w = (v − mean v)/r and r = √(‖v − mean v‖² + ε·d) of every filter v of d weights: [O, …] and [O, 1, …]."""
    inner = tuple(range(1, weight.ndim))
    centred = weight - weight.mean(inner, keepdim=True)
    centred = centred - centred.mean(inner, keepdim=True)  # what rounding left of a mean far above the deviation
    energy = centred.square().sum(inner, keepdim=True)
    deviation = (energy + eps * math.prod(weight.shape[1:])).sqrt()
    return centred / deviation, deviation


class StandardisedConv2d(nn.Conv2d):
    """``nn.Conv2d`` that convolves with `standardise`(weight): scale and mean of a filter have no effect.

    Samples do not mix: the statistics are those of the filters.
    """

    def __init__(self, *args: Any, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eps = eps

    def filters(self) -> Tensor:
        """What the input is convolved with, [O, C/groups, k, k]; standardised in float32 at least."""
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        return standardise(self.weight.to(precise), self.eps)[0].to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.filters(), self.bias)
