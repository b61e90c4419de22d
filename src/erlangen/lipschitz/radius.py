"""Robustness for free: the radius of the ball around an input in which the prediction cannot change."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from erlangen.lipschitz.bounds import lipschitz_constant


def certified_radius(logits: Tensor, constant: float | nn.Module) -> Tensor:
    """margin/(√2·L) for each row: moving the input by r moves the difference of two logits by at most √2·L·r.

    ``constant`` is L, or the network whose L is wanted. 0 where there is no certificate (L = ∞).
    """
    size = lipschitz_constant(constant) if isinstance(constant, nn.Module) else float(constant)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; expected (rows, classes) with at least two classes")
    top = torch.topk(logits.double(), 2, dim=1).values
    return (top[:, 0] - top[:, 1]) / (math.sqrt(2) * size)
