"""Small networks for small images: an MLP, and a GroupNorm CNN for any size."""

from __future__ import annotations

import math

import torch
from torch import nn


def mlp(input_shape: tuple[int, ...], classes: int, width: int = 128) -> nn.Module:
    """One hidden layer with tanh, which keeps activations and so gradients bounded."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.Tanh(), nn.Linear(width, classes))


def cnn(input_shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Convolution–GroupNorm–Mish stages, halving the image until it is about 4×4, and a linear head."""
    channels, size = input_shape[0], min(input_shape[1:])
    layers: list[nn.Module] = []
    while True:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Mish(), nn.GroupNorm(max(1, width // 8), width)]
        channels = width
        if size < 8:
            break
        layers.append(nn.MaxPool2d(2))
        size, width = size // 2, min(2 * width, 128)
    pooled = min(size, 4)
    return nn.Sequential(*layers, _Shrink(pooled), nn.Flatten(), nn.Linear(channels * pooled**2, classes))


class _Shrink(nn.Module):
    """Average pooling to a fixed grid, whatever comes in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-2:] == (self.size, self.size) else nn.functional.adaptive_avg_pool2d(x, self.size)


def opacus_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network of Opacus's MNIST example: 8×8 and 4×4 convolutions of stride 2 (16 and 32 channels), 32 hidden units."""
    side = [((n // 2 - 1 - 4) // 2 + 1) - 1 for n in input_shape[1:]]
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * side[0] * side[1], 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip
