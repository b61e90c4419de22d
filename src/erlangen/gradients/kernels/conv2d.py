"""Ordinary convolutions where the native library is slow on a GPU: input gradients, and images of few channels.

The input gradient of a convolution with stride 1 is the convolution of the cotangent with the kernel turned by 180° and
its channels exchanged; the native *forward* kernels run it faster than the native input-gradient kernels do (measured on
an H200, channels-last, 16-bit). An image of three channels fills a sixth of what the matrix units read at once: its
windows, padded to whole transactions, make one matrix product of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import usable
from erlangen.gradients.kernels.im2col import im2col, padded_width

HALF = (torch.bfloat16, torch.float16)
Pair = tuple[int, int]


def compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast would run a convolution in."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def turned(weight: Tensor) -> Tensor:
    """The kernel of the input gradient: [O, C, k, k] → [C, O, k, k], turned by 180°."""
    return weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)


class _Conv2d(torch.autograd.Function):
    """Stride 1, no groups: y = x ∗ W, ∂x = ∂y ∗ turned(W). ∂W by the native kernel where it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        ctx.padding, ctx.has_bias = padding, bias is not None
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, 1, padding)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        d = d.contiguous(memory_format=torch.channels_last)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            rest = tuple(k - 1 - p for k, p in zip(weight.shape[2:], ctx.padding))
            dx = F.conv2d(d, turned(weight), None, 1, rest)
        if ctx.needs_input_grad[1]:
            ones, zeros = [1, 1], [0, 0]
            dw = torch.ops.aten.convolution_backward(
                d, x, weight, None, ones, list(ctx.padding), ones, False, zeros, 1, (False, True, False)
            )[1]
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = d.sum((0, 2, 3), dtype=torch.float32).to(d.dtype)
        return dx, dw, db, None


def _turns(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    if not (usable(x, weight) and groups == 1 and compute_dtype(x) in HALF):
        return False
    ones = all(s == 1 for s in (*_pair(stride), *_pair(dilation)))
    large = x.shape[2] * x.shape[3] > 16  # on 4×4 maps the native input gradient is the faster one
    return ones and large and all(p < k for p, k in zip(_pair(padding), weight.shape[2:]))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """`F.conv2d`, differentiable, by the faster kernels where they are."""
    if not isinstance(padding, str) and few_channels(x, weight.shape, weight.shape[2:], groups):
        return windowed(x, weight, bias, stride, padding, dilation)[0]
    if isinstance(padding, str) or not _turns(x, weight, stride, padding, dilation, groups):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    dtype = compute_dtype(x)
    weight = weight.to(dtype, memory_format=torch.channels_last)
    with torch.autocast(x.device.type, enabled=False):
        return _Conv2d.apply(x.to(dtype), weight, None if bias is None else bias.to(dtype), _pair(padding))


def few_channels(x: Tensor, shape: Any, kernel: Any, groups: int) -> bool:
    """Whether a convolution reads an image (no input gradient) of so few channels that windows serve it better."""
    return (
        len(kernel) == 2
        and groups == 1
        and not x.requires_grad
        and usable(x)
        and compute_dtype(x) in HALF
        and shape[1] < 8
        and padded_width(shape[1], kernel) <= 64
    )


def windowed(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, Tensor]:
    """(convolution, windows) of an image; the windows are kept for its kernel gradients."""
    dtype = compute_dtype(x)
    outputs, kernel = weight.shape[0], weight.shape[2:]
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    size = tuple(
        (s + 2 * p - e * (k - 1) - 1) // t + 1 for s, p, e, k, t in zip(x.shape[2:], padding, dilation, kernel, stride)
    )
    with torch.autocast(x.device.type, enabled=False):
        windows = im2col(x.to(dtype), tuple(kernel), stride, padding, dilation, size)  # type: ignore[arg-type]
        flat = weight.permute(0, 2, 3, 1).reshape(outputs, -1).to(dtype)
        flat = F.pad(flat, (0, windows.shape[2] - flat.shape[1]))
        out = windows @ flat.mT if bias is None else torch.addmm(bias.to(dtype), windows.flatten(0, 1), flat.mT)
    return out.view(x.shape[0], *size, outputs).permute(0, 3, 1, 2), windows
