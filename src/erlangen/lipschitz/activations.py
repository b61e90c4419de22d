"""Activations that are 1-Lipschitz and vanish at zero; sorting and reflecting ones also preserve gradient norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import Activation, LipschitzLayer


class ReLU(LipschitzLayer):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class GroupSort(LipschitzLayer):
    """Sorts groups of ``size`` channels (dimension ``dim`` of the batch: 1 for images, −1 for vectors and tokens).

    A permutation of the input almost everywhere: norms of activations and cotangents are kept exactly.
    """

    def __init__(self, size: int = 2, dim: int = 1) -> None:
        super().__init__()
        if size < 2:
            raise ValueError(f"a group of {size} has nothing to sort; use size ≥ 2")
        self.size, self.dim = size, dim

    def channels(self, x: Activation) -> int:
        return x.shape[self.dim - 1 if self.dim > 0 else self.dim]

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        if self.channels(x) % self.size:
            raise ValueError(f"{self.channels(x)} channels do not split into groups of {self.size} (shape {x.shape})")
        return x.shape

    def forward(self, x: Tensor) -> Tensor:
        if self.size == 2 and x.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return _MaxMin.apply(x, self.dim)  # three times as fast as what autograd makes of max and min
        inner = self.dim + 1 if self.dim >= 0 else self.dim
        groups = x.unflatten(self.dim, (-1, self.size))
        if self.size == 2:
            ordered = torch.stack((groups.amax(inner), groups.amin(inner)), inner)
        else:
            ordered = groups.sort(inner, descending=True).values
        start = self.dim if self.dim >= 0 else self.dim - 1
        return ordered.flatten(start, start + 1)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}"


class _MaxMin(torch.autograd.Function):
    """Pairs of neighbouring channels as (larger, smaller). Only which pairs were exchanged is kept for the way back.

    A permutation forwards and its inverse backwards, also where a pair is equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        first, second = _pairs(x, dim)
        exchanged = first < second
        ctx.save_for_backward(exchanged)
        ctx.dim = dim
        return _exchange(first, second, exchanged, x, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (exchanged,) = ctx.saved_tensors
        return _Exchange.apply(cotangent, exchanged, ctx.dim), None


class _Exchange(torch.autograd.Function):
    """A fixed exchange of pairs: its own inverse and its own derivative, so that it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchanged: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(exchanged)
        ctx.dim = dim
        return _exchange(*_pairs(x, dim), exchanged, x, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (exchanged,) = ctx.saved_tensors
        return _Exchange.apply(cotangent, exchanged, ctx.dim), None, None


def _pairs(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    inner = dim + 1 if dim >= 0 else dim
    first, second = x.unflatten(dim, (-1, 2)).unbind(inner)
    return first, second


def _exchange(first: Tensor, second: Tensor, exchanged: Tensor, like: Tensor, dim: int) -> Tensor:
    out = torch.empty_like(like)
    upper, lower = _pairs(out, dim)
    torch.where(exchanged, second, first, out=upper)
    torch.where(exchanged, first, second, out=lower)
    return out


class MaxMin(GroupSort):
    """GroupSort of pairs."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__(2, dim)


class FullSort(LipschitzLayer):
    """Sorts all channels of each position."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(self.dim, descending=True).values


class Householder(LipschitzLayer):
    """Reflects each pair (a, b) of channels, half the width apart, to one side of a learnt line at angle θ/2.

    If a·sin(θ/2) − b·cos(θ/2) > 0 the pair is kept, else it is multiplied by [[cos θ, sin θ], [sin θ, −cos θ]].
    Norms are kept. The derivative of a reflected pair with respect to its θ is as long as the pair, so the gradient of
    all angles has norm ≤ G·X, and no projection is needed.
    """

    def __init__(self, channels: int, dim: int = 1) -> None:
        super().__init__()
        if channels % 2:
            raise ValueError(f"{channels} channels do not split into pairs; use an even number")
        self.pairs, self.dim = channels // 2, dim
        self.angle = nn.Parameter(torch.full((self.pairs,), math.pi / 2))  # at π/2 this is MaxMin

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, self.dim)
        shape = [1] * x.ndim
        shape[self.dim] = self.pairs
        angle = self.angle.view(shape).to(x.dtype)
        keep = a * torch.sin(angle / 2) - b * torch.cos(angle / 2) > 0
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat((torch.where(keep, a, a * cos + b * sin), torch.where(keep, b, a * sin - b * cos)), self.dim)

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        found = x.shape[self.dim - 1 if self.dim > 0 else self.dim]
        if found != 2 * self.pairs:
            raise ValueError(f"Householder of {2 * self.pairs} channels cannot take an input of shape {x.shape}")
        return x.shape

    def jacobian_bound(self, x: Activation) -> float:
        return (1.0 + 2 * x.roundoff) * x.rounded  # a rounded reflection has entries off by u

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        return {"angle": g * x.norm * (1.0 + 2 * x.roundoff) * x.rounded}
