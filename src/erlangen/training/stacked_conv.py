"""Convolutions of many models at once: output, kernel gradients of each row, input gradient.

Either the windows are written down once and all three are matrix products, or, where kernels can run and channels fill
the matrix units, nothing but the maps themselves is read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.kernels import conv_gradient, stacked_conv, stacked_windows, usable
from erlangen.gradients.kernels.im2col import im2col
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_layers import kernel_of, widened

if TYPE_CHECKING:
    from erlangen.training.stacked import Stack

#: rows of a matrix product start at multiples of this many elements, or tensor cores cannot load them
ALIGN = 8
#: blocks that a launch may have along its second axis
MOST = 65535


class StackedConv(StackedLayer):
    """One convolution of every model, on its own rows."""

    def __init__(self, stack: Stack, module: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__(stack, module, names)
        kernel = kernel_of(module)
        assert kernel is not None
        self.kernel = kernel

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        k, models = self.kernel, self.stack.models
        matrix, bias = k.matrix(self, x.dtype), k.bias(self)
        if self._direct(x, matrix.shape[2]):
            plane = k.size, k.stride, (k.padding, k.padding), k.dilation
            return stacked_conv.conv(x, matrix, None if bias is None else bias.float(), *plane), (x, None, matrix)
        columns, (height, width) = windows(x, k.size, k.stride, k.padding, k.dilation)
        spare = columns.shape[-1] - matrix.shape[1]
        matrix = F.pad(matrix, (0, 0, 0, spare)) if spare else matrix
        columns = columns.view(models, -1, columns.shape[-1])
        out = columns @ matrix if bias is None else torch.baddbmm(bias[:, None].to(x.dtype), columns, matrix)
        return out.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2), (x.shape, columns, matrix)

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        x, columns, matrix = saved
        shape, k = (x if columns is not None else x.shape), self.kernel
        cotangent = cotangent.contiguous(memory_format=torch.channels_last)  # or products read from odd places
        d = cotangent.permute(0, 2, 3, 1).flatten(1, 2)  # [N, T, O]
        k.pull_bias(self, d.sum(1, dtype=torch.promote_types(d.dtype, torch.float32)))
        if columns is None:
            stride, padding, dilation = ((n, n) for n in (k.stride, k.padding, k.dilation))
            rows = conv_gradient.conv_gradient(x, cotangent, 1, k.size, stride, padding, dilation)[0].flatten(2)
        else:
            rows = torch.bmm(d.mT, columns.view(shape[0], d.shape[1], -1))
        k.pull(self, rows, shape[1])
        return self._input_gradient(shape, matrix, cotangent) if wants_input else None

    def _direct(self, x: Tensor, outputs: int) -> bool:
        """Whether neither the output nor the rows' gradients need windows."""
        k = self.kernel
        size = [(n + 2 * k.padding - k.dilation * (s - 1) - 1) // k.stride + 1 for n, s in zip(x.shape[2:], k.size)]
        return (
            usable(x) and stacked_conv.worth_it(x, outputs) and x.shape[0] <= MOST
            and x.shape[0] * outputs * size[0] * size[1] < 1 << 31
            and conv_gradient.worth_it(size[0] * size[1], x.shape[1], outputs)
        )  # fmt: skip

    def _input_gradient(self, shape: torch.Size, matrix: Tensor, cotangent: Tensor) -> Tensor:
        k, (e, _, outputs) = self.kernel, matrix.shape
        taps = matrix[:, : k.size[0] * k.size[1] * shape[1]].view(e, *k.size, shape[1], outputs)
        around = tuple(s - 1 - k.padding for s in k.size)
        turns = k.stride == k.dilation == 1 and min(around) >= 0
        if turns and usable(cotangent) and stacked_conv.worth_it(cotangent, shape[1]):
            return stacked_conv.conv(cotangent, _turned(taps), None, k.size, 1, around, 1)  # type: ignore[arg-type]
        if turns and around == (k.padding, k.padding):
            columns, _ = windows(cotangent, k.size, 1, k.padding, 1)
            turned = _turned(taps)
            turned = F.pad(turned, (0, 0, 0, columns.shape[-1] - turned.shape[1]))
            dx = columns.view(e, -1, columns.shape[-1]) @ turned
            return dx.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
        # what every output sends to its window, then summed where windows overlap (models as groups of one convolution
        # would be shorter, and slow)
        d = cotangent.permute(0, 2, 3, 1).reshape(e, -1, outputs)
        sent = (d @ matrix.mT).view(shape[0], -1, matrix.shape[1])
        plane = k.size, k.stride, k.padding, k.dilation
        if usable(sent):
            out = (cotangent.shape[2], cotangent.shape[3])
            return stacked_windows.gather(sent, shape, out, *plane)
        return stacked_windows.reference(sent, shape, *plane)


def _turned(taps: Tensor) -> Tensor:
    """The kernel of the input gradient, turned by 180°: [E, k, k, C, O] → [E, k·k·O, C]"""
    return taps.flip(1, 2).transpose(3, 4).reshape(taps.shape[0], -1, taps.shape[3])


def windows(x: Tensor, size: tuple[int, int], stride: int, padding: int, dilation: int) -> tuple[Tensor, tuple[int, int]]:
    """[N, C, H, W] → [N, T, k·k·C and zeros up to a multiple of ALIGN], channels innermost; and the output's size."""
    reach = [dilation * (s - 1) + 1 for s in size]
    height, width = ((n + 2 * padding - r) // stride + 1 for n, r in zip(x.shape[2:], reach, strict=True))
    entries = size[0] * size[1] * x.shape[1]
    wide = x.shape[1] * x.element_size() % 16 == 0
    if usable(x) and not wide and x.dtype != torch.float64:  # elsewhere the copy below moves whole elements
        out = (height, width)
        return im2col(x, size, (stride, stride), (padding, padding), (dilation, dilation), out), out
    flat = _strided(x, size, (height, width), stride, padding, dilation).view(x.shape[0], height * width, entries)
    return (F.pad(flat, (0, -entries % ALIGN)) if entries % ALIGN else flat), (height, width)


def _strided(
    x: Tensor, size: tuple[int, int], out: tuple[int, int], stride: int, padding: int, dilation: int
) -> Tensor:  # fmt: skip
    """The windows by one strided copy."""
    maps = x.permute(0, 2, 3, 1)
    maps = F.pad(maps, (0, 0, padding, padding, padding, padding)) if padding else maps
    wide = widened(maps.contiguous())
    n, _, _, channels = wide.shape
    sn, sh, sw, sc = wide.stride()
    strides = (sn, sh * stride, sw * stride, sh * dilation, sw * dilation, sc)
    view = wide.as_strided((n, *out, *size, channels), strides)
    return view.reshape(n, out[0] * out[1], size[0] * size[1] * channels).view(x.dtype)
