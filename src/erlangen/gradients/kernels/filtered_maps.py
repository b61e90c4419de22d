"""Maps behind a filter: of every window of every channel, the frequencies that are kept.

    y[n, p, j, c] = Σ over taps t of  B[t, j] · x[n, p·stride + t·dilation − pad, c]

With them the kernel gradients of a convolution behind the filter are those of a 1×1 convolution of J·C channels:
(Σ_p d_p ⊗ a_p)B = Σ_p d_p ⊗ (a_p B), and whatever measures and adds up a convolution's gradients does it here. Rows lie model
by model, each model with columns B [taps, J] of its own. Sums are float32 and rounded once, to the type of x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two, usable

Pair = tuple[int, int]

#: the plane of a 1×1 convolution: kernel, stride, padding, dilation
POINT: tuple[Pair, Pair, Pair, Pair] = ((1, 1), (1, 1), (0, 0), (1, 1))
#: sums that a program holds
HELD = 8192


def reference(x: Tensor, columns: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """[N, J·C, H', W'], channels-last and c innermost, from x [N, C, H, W] and columns [E, taps, J]."""
    rows, channels = x.shape[:2]
    size = output_size(x, kernel, stride, padding, dilation)
    windows = F.unfold(x.to(columns.dtype), kernel, dilation, padding, stride)
    windows = windows.view(len(columns), -1, channels, columns.shape[1], size[0] * size[1])
    y = torch.einsum("enctp,etj->enpjc", windows, columns)
    return y.reshape(rows, *size, -1).to(x.dtype).permute(0, 3, 1, 2)


def output_size(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    sides = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    height, width = ((n + 2 * p - e * (k - 1) - 1) // s + 1 for n, k, s, p, e in sides)
    return height, width


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _filtered_maps(
        x, columns, out, each, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
        PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, J: tl.constexpr, WIDE: tl.constexpr, PIXELS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: PIXELS of one model, of which there are ``each``, BLOCK channels and all J columns."""
        first = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        here = first < each
        p = tl.program_id(2).to(tl.int64) * each + first
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        j = tl.arange(0, WIDE)
        top = (p // WO) % HO * SH - PH
        left = p % WO * SW - PW
        source = (p // (HO * WO)) * (H * W)
        table = columns + tl.program_id(2) * (KH * KW * J) + j
        total = tl.zeros([PIXELS, BLOCK, WIDE], tl.float32)
        for tap in tl.static_range(KH * KW):
            row = top + (tap // KW) * DH
            col = left + (tap % KW) * DW
            real = here & (row >= 0) & (row < H) & (col >= 0) & (col < W)
            at = (source + row * W + col) * C
            v = tl.load(x + at[:, None] + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
            total += v[:, :, None] * tl.load(table + tap * J, mask=j < J, other=0.0)[None, None, :]
        target = out + p[:, None, None] * (J * C) + j[None, None, :] * C + c[None, :, None]
        kept = here[:, None, None] & (c < C)[None, :, None] & (j < J)[None, None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=kept)


def filtered_maps(x: Tensor, columns: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """As `reference`; columns float32."""
    if not usable(x) or not x.numel():
        return reference(x, columns, kernel, stride, padding, dilation)
    x, columns = x.contiguous(memory_format=torch.channels_last), columns.contiguous()
    (rows, channels, height, width), (models, _, kept) = x.shape, columns.shape
    size = output_size(x, kernel, stride, padding, dilation)
    out = torch.empty(rows, *size, kept * channels, device=x.device, dtype=x.dtype)
    wide, block = power_of_two(kept), min(64, max(16, power_of_two(channels)))
    tile = max(1, HELD // (wide * block))
    each = rows // models * size[0] * size[1]
    _filtered_maps[(-(-each // tile), -(-channels // block), models)](
        x, columns, out, each, height, width, *size, channels, *kernel, *stride, *padding, *dilation, kept, wide,
        tile, block, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
