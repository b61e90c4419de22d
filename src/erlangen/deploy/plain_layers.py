"""Forward passes of our layers that have no twin in ``torch.nn``, in operations that every exporter knows.

No control flow on shapes, no autocast, no custom gradients: these are for use, not for training.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.lipschitz.activations import GroupSort, Householder
from erlangen.lipschitz.inputs import _INSIDE, BoundedInput, converted
from erlangen.lipschitz.pooling import _EPS, L2NormPool2d
from erlangen.lipschitz.shape import Bias, LayerCentering


class Normalise(nn.Module):
    """(pixel − mean)/std."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Ball(nn.Module):
    """`BoundedInput`: finite entries, colours, the channels' means taken off, then the ball or sphere."""

    def __init__(self, layer: BoundedInput) -> None:
        super().__init__()
        self.target, self.sphere, self.colour = layer.bound * _INSIDE, layer.mode == "sphere", layer.colour
        self.centre, self.scale = layer.centre, layer.scale

    def forward(self, x: Tensor) -> Tensor:
        x = converted(_finite(x), self.colour)
        if self.centre:
            positions = x.flatten(2)
            x = _finite(positions - positions.mean(2, keepdim=True)).reshape_as(x)
        flat = x.flatten(1)
        largest = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
        unit = flat / largest
        target = self.target / unit.square().sum(1, keepdim=True).sqrt().clamp(min=1e-30)
        scaled = unit * (target if self.sphere else torch.minimum(largest * self.scale, target))
        return _finite(scaled).reshape_as(x)


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


class L2Pool(nn.Module):
    def __init__(self, layer: L2NormPool2d) -> None:
        super().__init__()
        self.kernel, self.stride, self.size = layer.kernel, layer.stride, math.prod(layer.kernel)

    def forward(self, x: Tensor) -> Tensor:
        return (F.avg_pool2d(x.square(), self.kernel, self.stride) * self.size + _EPS**2).sqrt() - _EPS


class ScaledMean(nn.Module):
    """√n times the mean over all n positions of a map, or over n ``tokens``: Σ/√n."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2) if self.tokens else x.flatten(2)
        return rows.sum(2) * rows.shape[2] ** -0.5


class Sorted(nn.Module):
    """`GroupSort`: pairs by max and min, larger groups by a sort, each group's largest first."""

    def __init__(self, layer: GroupSort) -> None:
        super().__init__()
        self.size, self.dim = layer.size, layer.dim
        self.inner = layer.dim + 1 if layer.dim >= 0 else layer.dim
        self.start = layer.dim if layer.dim >= 0 else layer.dim - 1

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(self.dim, (-1, self.size))
        if self.size == 2:
            first, second = groups.unbind(self.inner)
            ordered = torch.stack((torch.maximum(first, second), torch.minimum(first, second)), self.inner)
        else:
            ordered = groups.sort(self.inner, descending=True)[0]
        return ordered.flatten(self.start, self.start + 1)


class Centred(nn.Module):
    def __init__(self, layer: LayerCentering) -> None:
        super().__init__()
        self.start = 2 if layer.per_channel else 1

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(self.start)
        return (flat - flat.mean(self.start, keepdim=True)).reshape_as(x)


class AddBias(nn.Module):
    def __init__(self, layer: Bias) -> None:
        super().__init__()
        self.bias, self.dim = nn.Parameter(layer.bias.detach().clone()), layer.dim

    def forward(self, x: Tensor) -> Tensor:
        return (x.movedim(self.dim, -1) + self.bias).movedim(-1, self.dim)


class Reflect(nn.Module):
    """`Householder`, with its cosines and sines computed once."""

    half_cos: Tensor
    half_sin: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, layer: Householder) -> None:
        super().__init__()
        angle = layer.angle.detach()
        self.dim = layer.dim
        for name, values in (
            ("half_cos", torch.cos(angle / 2)), ("half_sin", torch.sin(angle / 2)), ("cos", torch.cos(angle)),
            ("sin", torch.sin(angle)),
        ):  # fmt: skip
            self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.movedim(self.dim, -1).chunk(2, -1)
        keep = a * self.half_sin - b * self.half_cos > 0
        first = torch.where(keep, a, a * self.cos + b * self.sin)
        second = torch.where(keep, b, a * self.sin - b * self.cos)
        return torch.cat((first, second), -1).movedim(-1, self.dim)
