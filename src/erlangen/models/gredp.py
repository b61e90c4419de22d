"""The networks of the GReDP paper (its Tables 4 to 8).

The tables give numbers of *layers*, not of channels. What they leave open is fixed here and tested:

- LeNet-5: the classical one for 28×28 (padding 2, channels 6 and 16, 61,706 parameters); ``channels=(6, 6)`` is what
  its table says literally.
- ResNet-20: 1 + 3×6 convolutions of 16, 32, 64 channels, average pooling instead of strides, shortcuts that pad the new
  channels with zeros (no parameters), so that the convolutions are 7 + 6 + 6.
- Model-3: 2 + 2 + 2 convolutions of 32, 64, 128 channels, then 120 and 10 units.
- AlexNet: 5 convolutions of 64, 192, 384, 256, 256 channels with a pooling after each, then 120, 84 and 10 units.
- ResNet-18: a 7×7 stem, 4×4 convolutions of 64 … 512 channels with max pooling after each stage, 1×1 projections where
  the channels change (the table does not count them).

Residual networks use group norm: no layer mixes samples. ``circulant=b`` makes the layers between the first and the last
block-circulant, which is where the paper's gain is real.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.circulant import make_circulant
from erlangen.models.public import load_public


def circulant(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Let ``circulant=b`` make every layer but the first and the last block-circulant with blocks of b.

    Frozen layers stay as they are, and public weights become their nearest circulant twins; without them, new weights
    are drawn.
    """

    @functools.wraps(build)
    def made(
        input_shape: tuple[int, ...] = (), classes: int = 10, circulant: int | None = None, **options: Any
    ) -> nn.Module:
        model = build(input_shape, classes, **options) if input_shape else build(classes=classes, **options)
        if circulant is None:
            return model
        layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
        first, *_, last = layers
        frozen = [n for n, m in layers.items() if not m.weight.requires_grad]
        return make_circulant(model, circulant, skip=(first, last, *frozen), fresh=options.get("weights") is None)

    return made


@circulant
def lenet5(
    input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, channels: tuple[int, int] = (6, 16)
) -> nn.Module:
    first, second = channels
    side = (input_shape[1] // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(input_shape[0], first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(second * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


@circulant
def model3(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    side = input_shape[1] // 8
    head = [nn.Flatten(), nn.Linear(channels * side * side, 120), nn.ReLU(), nn.Linear(120, classes)]
    return nn.Sequential(*layers, *head)


@circulant
def alexnet(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (64, 192, 384, 256, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    side = input_shape[1] // 32
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut: a 1×1 projection, or new channels padded with zeros."""

    def __init__(self, inputs: int, outputs: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.extra = outputs - inputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if project and self.extra else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.extra:
            x = F.pad(x, (0, 0, 0, 0, 0, self.extra))
        return F.relu(y + x)


def _stage(inputs: int, outputs: int, blocks: int, project: bool) -> list[nn.Module]:
    return [BasicBlock(inputs if k == 0 else outputs, outputs, project) for k in range(blocks)]


@circulant
def resnet20(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    inputs = 16
    for width in (16, 32, 64):
        layers += [*_stage(inputs, width, 3, project=False), nn.AvgPool2d(2)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


@circulant
def resnet18(
    input_shape: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    weights: str | None = None,
    convolutions: int | None = None,
) -> nn.Module:
    """``weights`` is a checkpoint of *public* training (see `load_public`); ``convolutions`` = 1 or 2 fine-tunes the
    last ones and the head, the rest stays frozen."""
    layers: list[nn.Module] = [
        nn.Conv2d(input_shape[0], 64, 7, padding=3, bias=False), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for width in (64, 128, 256, 512):
        layers += [*_stage(inputs, width, 2, project=True), nn.MaxPool2d(2)]
        inputs = width
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    if weights is not None:
        load_public(model, weights)
    return model if convolutions is None else fine_tune(model, convolutions)


def fine_tune(model: nn.Module, convolutions: int = 1, head: bool = True) -> nn.Module:
    """Freeze everything but the last ``convolutions`` k×k convolutions (k > 1) and, unless told otherwise, the head.

    Build the optimizer from the parameters that still ask for a gradient.
    """
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1]
    if not 0 <= convolutions <= len(convs):
        raise ValueError(f"convolutions is {convolutions}, but the model has {len(convs)} convolutions with k > 1")
    heads = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:] if head else []
    model.requires_grad_(False)
    for layer in [*convs[len(convs) - convolutions :], *heads]:
        layer.requires_grad_(True)
    return model


__all__ = ["BasicBlock", "alexnet", "fine_tune", "lenet5", "load_public", "model3", "resnet18", "resnet20"]
