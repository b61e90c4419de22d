"""Layers that move entries about, centre them, or add a bias."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.lipschitz.base import MARGIN, Activation, LipschitzLayer, shrink_to


class Flatten(LipschitzLayer):
    """[n, …] → [n, features]."""

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return (math.prod(x.shape),)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Permute(LipschitzLayer):
    """Reorders the dimensions of a sample; they count from 1, the batch stays in front."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        if sorted(dims) != list(range(1, len(dims) + 1)):
            raise ValueError(f"Permute{dims} must name every dimension of a sample once, from 1 to {len(dims)}")
        self.dims = dims

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        if len(x.shape) != len(self.dims):
            raise ValueError(f"Permute{self.dims} cannot take an input of shape {x.shape}")
        return tuple(x.shape[d - 1] for d in self.dims)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, *self.dims)


class Tokens(LipschitzLayer):
    """Feature maps [C, H, W] → tokens [H·W, C]."""

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return (x.shape[1] * x.shape[2], x.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class InvertibleDownsampling(LipschitzLayer):
    """[C, H, W] → [C·s², H/s, W/s]: every value is kept, so norms are too."""

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        channels, height, width = x.shape
        if height % self.factor or width % self.factor:
            raise ValueError(f"an image of {height}×{width} does not split into {self.factor}×{self.factor} blocks")
        return (channels * self.factor**2, height // self.factor, width // self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, self.factor)


class LayerCentering(LipschitzLayer):
    """Subtracts the sample's own mean: over all its entries, or over the positions of each channel (``per_channel``).

    An orthogonal projection, so 1-Lipschitz. Never over the batch: that would mix samples.
    """

    def __init__(self, per_channel: bool = False) -> None:
        super().__init__()
        self.per_channel = per_channel

    def jacobian_bound(self, x: Activation) -> float:
        return x.rounded**2

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(tuple(range(2 if self.per_channel else 1, x.ndim)), keepdim=True)


class Bias(LipschitzLayer):
    """Adds b of norm ≤ ``bound`` to every position: channels are dimension ``dim`` of the batch (1, or −1 for tokens).

    Added at P positions, its gradient has norm ≤ √P·G, and the output norm is ≤ X + √P·‖b‖.
    """

    def __init__(self, channels: int, bound: float = 1.0, dim: int = 1) -> None:
        super().__init__()
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound is {bound!r}; it must be a positive, finite number")
        self.bias, self.bound, self.dim = nn.Parameter(torch.zeros(channels)), float(bound), dim

    def positions(self, x: Activation) -> int:
        channels = x.shape[self.dim - 1 if self.dim > 0 else self.dim]
        if channels != self.bias.numel():
            raise ValueError(f"a bias of {self.bias.numel()} channels cannot be added to an input of shape {x.shape}")
        return math.prod(x.shape) // channels

    def propagate_input(self, x: Activation) -> Activation:
        return x.to(x.shape, (x.norm + math.sqrt(self.positions(x)) * self.bound) * x.rounded**2)

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        return {"bias": g * math.sqrt(self.positions(x)) * x.rounded}

    def project(self) -> None:
        shrink_to(self.bias, self.bias.detach().double().norm() * MARGIN, self.bound)

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.ndim
        shape[self.dim] = -1
        return x + self.bias.view(shape)
