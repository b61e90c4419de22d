"""Lipschitz networks for training without clipping: dense, LeNet-size, VGG (130k to 2M parameters), ResNet, MLP-Mixer.

All are 1-Lipschitz behind their input layer, with gradient-norm preserving pieces: MaxMin activations, scaled average
pooling, invertible down-sampling, averaged residual blocks. There are no biases: one on a feature map costs √(H·W) in
sensitivity.

Inputs are centred per channel, multiplied by 2/√(entries) and projected onto the unit ball (``bound=1``). Sensitivities
are then those of the loss times small constants, so that one learning rate suits all data sets; pixels in [−1, 1] have
a standard deviation near ½, so that most images lie near the sphere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from erlangen.lipschitz import (
    AvgPool2d,
    BackwardClip,
    BoundedInput,
    Flatten,
    GlobalAvgPool,
    InvertibleDownsampling,
    LipschitzLayer,
    MaxMin,
    Permute,
    Residual,
    Sequential,
    SpectralConv2d,
    SpectralDense,
    TokenMean,
    Tokens,
)

#: widths of the three stages of `lipschitz_vgg` by size: about 130k, 500k and 2M parameters
VGG_WIDTHS = {"small": (24, 48, 80), "medium": (48, 96, 156), "large": (96, 192, 312)}


def _start(
    input_shape: tuple[int, ...], bound: float, mode: str, colour: str, centre: bool, scale: float | None
) -> tuple[BoundedInput, int]:
    scale = 2.0 / math.sqrt(math.prod(input_shape)) if scale is None else scale
    first = BoundedInput(tuple(input_shape), bound, mode, colour, centre=centre, scale=scale)
    return first, 1 if colour == "grayscale" else input_shape[0]


def _finish(layers: list[LipschitzLayer], backward_clip: float | None) -> Sequential:
    return Sequential(*layers, *([BackwardClip(backward_clip, "sum")] if backward_clip else []))  # as sessions reduce losses


def lipschitz_mlp(
    input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, *, hidden: Sequence[int] = (), bound: float = 1.0,
    mode: str = "ball", colour: str = "rgb", centre: bool = True, scale: float | None = None, lipschitz: float = 1.0,
    backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """Dense layers of the given widths with MaxMin between; none is a linear classifier, the best on little data."""
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    layers: list[LipschitzLayer] = [first, Flatten()]
    width = channels * math.prod(input_shape[1:])
    for outputs in hidden:
        layers += [SpectralDense(width, outputs, lipschitz=lipschitz), MaxMin(-1)]
        width = outputs
    return _finish([*layers, SpectralDense(width, classes, lipschitz=lipschitz)], backward_clip)


def lipschitz_patches(
    input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, *, patch: int = 4, width: int = 32,
    mix: int | None = None, bound: float = 1.0, mode: str = "ball", colour: str = "rgb", centre: bool = True,
    scale: float | None = None, backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """Disjoint patches through one matrix (``width`` features each), perhaps a 3×3 convolution (``mix``), a dense layer.

    Windows that do not overlap cost nothing in sensitivity: the factor √(⌈k/s⌉²) is 1.
    """
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    rows, columns = input_shape[1] // patch, input_shape[2] // patch
    layers: list[LipschitzLayer] = [first, SpectralConv2d(channels, width, patch, patch, padding=0), MaxMin()]
    if mix is not None:
        layers += [SpectralConv2d(width, mix, 3), MaxMin()]
        width = mix
    return _finish([*layers, Flatten(), SpectralDense(width * rows * columns, classes)], backward_clip)


def lipschitz_lenet(
    input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, *, bound: float = 1.0, mode: str = "ball",
    colour: str = "rgb", centre: bool = True, scale: float | None = None, width: int = 16,
    lipschitz: float = 1.0, backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """Two convolutions and two dense layers, 114k parameters on MNIST. ``lipschitz`` is the constant of each layer."""
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    layers: list[LipschitzLayer] = [first]
    for outputs in (width, 2 * width):
        layers += [SpectralConv2d(channels, outputs, 5, lipschitz=lipschitz), MaxMin(), AvgPool2d(2, scaled=True)]
        channels = outputs
    features = channels * (input_shape[1] // 4) * (input_shape[2] // 4)
    layers += [Flatten(), SpectralDense(features, 64, lipschitz=lipschitz), MaxMin(-1)]
    return _finish([*layers, SpectralDense(64, classes, lipschitz=lipschitz)], backward_clip)


def lipschitz_vgg(
    input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, *, size: str | tuple[int, int, int] = "small",
    bound: float = 1.0, mode: str = "ball", colour: str = "rgb", centre: bool = True, scale: float | None = None,
    backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """Three stages of two 3×3 convolutions and scaled average pooling, then a dense layer; a size, or three widths."""
    if isinstance(size, str) and size not in VGG_WIDTHS:
        raise ValueError(f"size is {size!r}; choose one of {', '.join(VGG_WIDTHS)}, or give three widths")
    widths = VGG_WIDTHS[size] if isinstance(size, str) else size
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    layers: list[LipschitzLayer] = [first]
    for outputs in widths:
        layers += [SpectralConv2d(channels, outputs, 3), MaxMin(), SpectralConv2d(outputs, outputs, 3), MaxMin()]
        layers += [AvgPool2d(2, scaled=True)]
        channels = outputs
    layers += [GlobalAvgPool(scaled=True), SpectralDense(channels, classes)]
    return _finish(layers, backward_clip)


def lipschitz_resnet(
    input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, *, width: int = 32, blocks: int = 2,
    bound: float = 1.0, mode: str = "ball", colour: str = "rgb", centre: bool = True, scale: float | None = None,
    backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """Stages of averaged residual blocks (x + f(x))/2, with invertible down-sampling and 1×1 convolutions between."""
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    layers: list[LipschitzLayer] = [first, SpectralConv2d(channels, width, 3), MaxMin()]
    for stage in range(3):
        if stage:
            layers += [InvertibleDownsampling(2), SpectralConv2d(4 * width, 2 * width, 1), MaxMin()]
            width *= 2
        for _ in range(blocks):
            body = (SpectralConv2d(width, width, 3), MaxMin(), SpectralConv2d(width, width, 3))
            layers += [Residual(*body), MaxMin()]
    layers += [GlobalAvgPool(scaled=True), SpectralDense(width, classes)]
    return _finish(layers, backward_clip)


def lipschitz_mixer(
    input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, *, patch: int = 4, width: int = 128, blocks: int = 3,
    bound: float = 1.0, mode: str = "ball", colour: str = "rgb", centre: bool = True, scale: float | None = None,
    backward_clip: float | None = None,
) -> Sequential:  # fmt: skip
    """MLP-Mixer: patches become tokens; averaged residual MLPs mix tokens, then channels."""
    first, channels = _start(input_shape, bound, mode, colour, centre, scale)
    tokens = (input_shape[1] // patch) * (input_shape[2] // patch)
    layers: list[LipschitzLayer] = [first, InvertibleDownsampling(patch), Tokens()]
    layers += [SpectralDense(channels * patch**2, width)]
    for _ in range(blocks):
        mix = (Permute(2, 1), SpectralDense(tokens, tokens), MaxMin(-1), SpectralDense(tokens, tokens), Permute(2, 1))
        layers += [Residual(*mix), Residual(SpectralDense(width, width), MaxMin(-1), SpectralDense(width, width))]
    layers += [TokenMean(scaled=True), SpectralDense(width, classes)]
    return _finish(layers, backward_clip)
