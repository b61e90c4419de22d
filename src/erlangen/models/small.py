"""Small networks for small images: logistic regression, an MLP, a GroupNorm CNN for any size, LeNet-5."""

from __future__ import annotations

import math

import torch
from torch import nn


def logistic(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear map of the pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


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


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5: two 5×5 convolutions (6 and 16 channels), three linear layers (120, 84, classes), tanh, average pooling."""
    channels, height, width = input_shape
    pad = 2 if height < 32 else 0
    side = [((n + 2 * pad - 4) // 2 - 4) // 2 for n in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=pad), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * side[0] * side[1], 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes),
    )  # fmt: skip
