"""Robustness for free: the radius of the ball around an input in which the prediction cannot change."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from erlangen.lipschitz.bounds import lipschitz_constant
from erlangen.lipschitz.compose import Sequential

#: logits are float32 sums: a margin below this share of their size may be rounding, and certifies nothing
_ROUNDING = 1e-5


def certified_radius(model: nn.Module | float, logits: Tensor) -> Tensor:
    """[rows] float64: no input within this L2 distance is predicted differently. margin/(√2·L), for logits [rows, K].

    Moving the input by r moves the difference of two logits by at most √2·L·r. ``model`` is the network that made the
    logits, or its Lipschitz constant L; distances are those of its inputs as it gets them. 0 where nothing is
    certified: L = ∞ (sphere projection, HSV), a tie, logits that are not finite.
    The weights must be inside their constraints, as they are after training; an average of such weights is, too.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; expected (rows, classes) with at least two classes")
    size = lipschitz_constant(model) if isinstance(model, nn.Module) else float(model)
    if not size > 0:
        raise ValueError(f"the Lipschitz constant is {size!r}; it must be positive")
    precise = logits.detach().double()
    top = torch.topk(precise.nan_to_num(nan=math.inf), 2, dim=1).values
    slack = _ROUNDING * precise.abs().amax(1)
    radius = (top[:, 0] - top[:, 1] - slack).clamp(min=0.0) / (math.sqrt(2) * size)
    return torch.where(precise.isfinite().all(1), radius, 0.0)


def is_certifiable(model: nn.Module) -> bool:
    """Whether `certified_radius` of this model can be positive: a Lipschitz network whose input layer has a constant."""
    if not isinstance(model, Sequential):
        return False
    try:
        return math.isfinite(lipschitz_constant(model))
    except ValueError:  # a Sequential that is not a whole network
        return False
