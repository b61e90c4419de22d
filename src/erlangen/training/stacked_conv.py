"""Convolutions of many models at once: output, kernel gradients of each row, input gradient.

Either the windows are written down once and all three are matrix products, or, where kernels can run and channels fill
the matrix units, nothing but the maps themselves is read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.kernels import (
    conv_gradient,
    conv_unformed,
    stacked_conv,
    stacked_fields,
    stacked_windows,
    usable,
)
from erlangen.gradients.kernels.im2col import im2col
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_kernels import PlainKernel, kernel_of, widened
from erlangen.training.stacked_positions import Blocks, Positions
from erlangen.training.stacked_rows import Plane, Unformed

if TYPE_CHECKING:
    from erlangen.training.stacked import Stack

#: rows of a matrix product start at multiples of this many elements, or tensor cores cannot load them
ALIGN = 8
#: blocks that a launch may have along its second axis
MOST = 65535
#: models whose sums are worth a launch each
FEW = 32
WINDOWS, DIRECT, MAPS, UNFORMED, POSITIONS = "windows", "direct", "maps", "unformed", "positions"


@dataclass(frozen=True)
class Kept:
    """What the way back wants: the kernels, and the windows, or the input where those are not needed."""

    shape: torch.Size
    matrix: Tensor
    way: str
    maps: Tensor


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
        way = self._way(x, matrix.shape[2])
        if way not in (WINDOWS, POSITIONS) and stacked_conv.worth_it(x, matrix.shape[2]):
            wide = None if bias is None else bias.float()
            out = stacked_conv.conv(x, matrix, wide, k.size, k.stride, (k.padding, k.padding), k.dilation)
            return out, Kept(x.shape, matrix, way, x)
        columns, (height, width) = windows(x, k.size, k.stride, k.padding, k.dilation)
        spare = columns.shape[-1] - matrix.shape[1]
        matrix = F.pad(matrix, (0, 0, 0, spare)) if spare else matrix
        out = _product(columns, matrix, bias)
        columns = columns.view(models, -1, columns.shape[-1])
        kept = Kept(x.shape, matrix, way, columns if way in (WINDOWS, POSITIONS) else x)
        return out.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2), kept

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        kept: Kept = saved
        k = self.kernel
        cotangent = cotangent.contiguous(memory_format=torch.channels_last)  # or products read from odd places
        d = cotangent.permute(0, 2, 3, 1).flatten(1, 2)  # [N, T, O]
        if "bias" in self.names:
            k.pull_bias(self, d.sum(1, dtype=torch.promote_types(d.dtype, torch.float32)))
        if kept.way == UNFORMED:
            self.record("weight", Unformed(self.stack.models, kept.maps, cotangent, self._plane()))
        elif kept.way == POSITIONS:
            taps, channels = k.size[0] * k.size[1], kept.shape[1]
            a = kept.maps.view(*d.shape[:2], -1)[..., : taps * channels].unflatten(2, (taps, channels))
            assert k.block_size is not None
            self.record("weight", Positions(self.stack.models, a, d, Blocks(k.block_size)))
        elif kept.way == MAPS:
            k.pull_maps(self, kept.maps, cotangent)
        elif kept.way == DIRECT:
            k.pull(self, self._formed(kept.maps, cotangent), kept.shape[1])
        else:
            k.pull(self, torch.bmm(d.mT, kept.maps.view(*d.shape[:2], -1)), kept.shape[1])
        return self._input_gradient(kept.shape, kept.matrix, cotangent) if wants_input else None

    def _formed(self, x: Tensor, d: Tensor) -> Tensor:
        """Kernel gradients of every row, [N, O, k·k·C]. A tile of sixteen channels and one tap leaves most of a program idle:
        there all taps are one product."""
        k, channels = self.kernel, x.shape[1]
        if channels == 16 and stacked_fields.fits(x, d.shape[1], channels, k.size[0] * k.size[1]):
            return stacked_fields.gradients(x, d, channels, k.size, k.stride, k.padding, k.dilation)[:, 0]
        return conv_gradient.conv_gradient(x, d, 1, *self._plane())[0].flatten(2)

    def _plane(self) -> Plane:
        k = self.kernel
        return Plane(k.size, (k.stride, k.stride), (k.padding, k.padding), (k.dilation, k.dilation))

    def _way(self, x: Tensor, outputs: int) -> str:
        """How the rows' kernel gradients are found: from windows, by a kernel that forms them (at once as those of the
        parameters, if it can), or by one that does not."""
        k, channels = self.kernel, x.shape[1]
        size = [(n + 2 * k.padding - k.dilation * (s - 1) - 1) // k.stride + 1 for n, s in zip(x.shape[2:], k.size)]
        tokens = size[0] * size[1]
        if tokens <= self.stack.positions and k.block_size is not None:
            return POSITIONS
        many = x.shape[0] > MOST or max(x.numel(), x.shape[0] * outputs * tokens) >= 1 << 31
        if many or not usable(x) or x.dtype not in (torch.bfloat16, torch.float16):
            return WINDOWS
        few = self.stack.models <= FEW and isinstance(k, PlainKernel)
        if few and conv_unformed.cheaper(tokens, channels, outputs):
            return UNFORMED
        if k.joins(x, outputs):
            return MAPS
        direct = stacked_conv.worth_it(x, outputs) and conv_gradient.worth_it(tokens, channels, outputs)
        return DIRECT if direct else WINDOWS

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


def _product(columns: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[N, T, O] from windows [N, T, K] and the kernels [E, K, O] of their models."""
    maps = columns.mT.unsqueeze(3)  # windows as a map of T pixels and K channels, where they lie
    if bias is not None and usable(maps) and stacked_conv.worth_it(maps, matrix.shape[2]):
        return stacked_conv.conv(maps, matrix, bias.float(), (1, 1), 1, (0, 0), 1).squeeze(3).mT
    rows = columns.view(matrix.shape[0], -1, columns.shape[2])
    if bias is None:
        return (rows @ matrix).view(*columns.shape[:2], -1)
    start = bias[:, None].to(rows.dtype)  # written down for every row first
    return torch.baddbmm(start, rows, matrix).view(*columns.shape[:2], -1)


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
    flat = view.reshape(n, out[0] * out[1], size[0] * size[1] * channels)
    return (flat if flat.stride(-1) == 1 else flat.contiguous()).view(x.dtype)  # one channel: a step of strides is a view
