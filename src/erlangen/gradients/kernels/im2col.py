"""The windows of a map with few channels, one row per output pixel, padded to whole memory transactions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two

Pair = tuple[int, int]


def padded_width(channels: int, kernel: Pair) -> int:
    """Entries of a window, rounded up to 16."""
    return -(-channels * kernel[0] * kernel[1] // 16) * 16


def reference(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """[rows, pixels, taps·C, zero-padded], channels innermost."""
    rows, channels = x.shape[:2]
    windows = F.unfold(x, kernel, dilation, padding, stride).view(rows, channels, kernel[0] * kernel[1], -1)
    flat = windows.permute(0, 3, 2, 1).flatten(2)
    return F.pad(flat, (0, padded_width(channels, kernel) - flat.shape[2]))


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _im2col(
        x, out, pixels, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, C: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
        DH: tl.constexpr, DW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
        here = p < pixels
        k = tl.arange(0, BLOCK)
        tap = k // C
        row = ((p // WO) % HO * SH)[:, None] + (tap // KW * DH)[None, :] - PH
        col = (p % WO * SW)[:, None] + (tap % KW * DW)[None, :] - PW
        real = here[:, None] & (k < KH * KW * C)[None, :] & (row >= 0) & (row < H) & (col >= 0) & (col < W)
        at = (((p // (HO * WO)) * H)[:, None] + row) * W + col
        value = tl.load(x + at * C + (k % C)[None, :], mask=real, other=0.0)
        tl.store(out + p[:, None] * WIDTH + k[None, :], value, mask=here[:, None] & (k < WIDTH)[None, :])


def im2col(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, size: Pair) -> Tensor:
    """As `reference`, for channels-last x and output maps of ``size``."""
    rows, channels, height, width = x.shape
    entries, pixels = padded_width(channels, kernel), rows * size[0] * size[1]
    out = torch.empty(rows, size[0] * size[1], entries, device=x.device, dtype=x.dtype)
    block = max(16, power_of_two(entries))
    tile = max(1, 2048 // block)
    _im2col[(-(-pixels // tile),)](
        x.contiguous(memory_format=torch.channels_last), out, pixels, height, width, *size, channels, *kernel, *stride,
        *padding, *dilation, entries, block, tile, num_warps=4,
    )  # fmt: skip
    return out
