"""The networks of the GeoDP paper: logistic regression, the CNN of 21,840 parameters, a ResNet of three blocks.

The CNN is fixed by its number of parameters: 5×5 convolutions to 10 and 20 channels, then 50 and 10 units. Of the
ResNet the paper says only "3 residual blocks, each with 2 convolutions and 1 ReLU": here a 3×3 stem to 16 channels,
blocks of 16, 32 and 64 with average pooling in between, 1×1 projections, group norm, and the mean over the image.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


def logistic_regression(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def cnn(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """21,840 parameters on 28×28 grey images; the softmax is in the loss."""
    side = ((input_shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(20 * side * side, 50), nn.ReLU(), nn.Linear(50, classes),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions and one ReLU around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x)


def resnet3(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    stem = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
    return nn.Sequential(
        stem, Block(16, 16), nn.AvgPool2d(2), Block(16, 32), nn.AvgPool2d(2), Block(32, 64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


__all__ = ["Block", "cnn", "logistic_regression", "resnet3"]
