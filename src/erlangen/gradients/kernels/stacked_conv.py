"""Convolutions of many models at once, each with its own kernel, without writing windows down.

    y[e, i, p, o] = b[e, o] + Σ over taps t and channels c of  x[e, i, p·stride + t·dilation − pad, c] · w[e, t, c, o]

One program forms a tile of the pixels of one model's rows and output channels; the operands are read where they lie
(channels-last), one tap at a time. Sums are float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two

Pair = tuple[int, int]


def reference(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Pair, stride: int, padding: Pair, dilation: int
) -> Tensor:  # fmt: skip
    """[E·P, O, H', W'] from x [E·P, C, H, W] and kernels w [E, k·k·C, O], channels inside taps."""
    models, _, outputs = w.shape
    kernels = w.view(models, *size, x.shape[1], outputs).permute(0, 4, 3, 1, 2)
    parts = zip(x.chunk(models), kernels, [None] * models if bias is None else bias, strict=True)
    return torch.cat([F.conv2d(p, k, b, stride, padding, dilation) for p, k, b in parts])


def worth_it(x: Tensor, outputs: int) -> bool:
    """16 bits and enough channels to fill the matrix units, not so many that the native product is out of reach: windows of
    many channels are worth writing down where many outputs read them."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and 16 <= x.shape[1] <= (128 if outputs > 64 else 256) and outputs >= 16 and 0 < x.numel() < 1 << 31


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _conv(
        x, w, bias, out, pixels, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, C: tl.constexpr,
        O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
        D: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr, BLOCK_O: tl.constexpr,
    ):  # fmt: skip
        """One program: BLOCK of a model's ``pixels`` (of all its rows), BLOCK_O output channels."""
        model = tl.program_id(1).to(tl.int64)
        m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = m < pixels
        top = (m // WO) % HO * S - PH
        left = m % WO * S - PW
        first = (m // (HO * WO)) * H
        o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
        source = x + model * (pixels // (HO * WO)) * (H * W * C)
        kernel = w + model * (KH * KW * C * O)
        STEPS: tl.constexpr = (C + DEEP - 1) // DEEP
        total = tl.zeros([BLOCK, BLOCK_O], tl.float32)
        for step in range(KH * KW * STEPS):
            tap = step // STEPS
            c = (step % STEPS) * DEEP + tl.arange(0, DEEP)
            row = top + (tap // KW) * D
            col = left + (tap % KW) * D
            real = here & (row >= 0) & (row < H) & (col >= 0) & (col < W)
            at = ((first + row) * W + col) * C
            a = tl.load(source + at[:, None] + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0)
            b = tl.load(
                kernel + (tap * C + c)[:, None] * O + o[None, :], mask=(c < C)[:, None] & (o < O)[None, :], other=0.0
            )
            total = tl.dot(a, b, total)
        if BIAS:
            total += tl.load(bias + model * O + o, mask=o < O, other=0.0)[None, :]
        target = out + model * pixels * O + m[:, None] * O + o[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=here[:, None] & (o < O)[None, :])


def conv(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Pair, stride: int, padding: Pair, dilation: int
) -> Tensor:  # fmt: skip
    """As `reference`, channels-last; w contiguous and of the type of x, bias [E, O] float32."""
    x, w = x.contiguous(memory_format=torch.channels_last), w.contiguous()
    (n, channels, height, width), (models, _, outputs) = x.shape, w.shape
    reach = [dilation * (k - 1) + 1 for k in size]
    out_height, out_width = (
        (length + 2 * p - r) // stride + 1 for length, p, r in zip((height, width), padding, reach, strict=True)
    )
    out = torch.empty(
        n, outputs, out_height, out_width, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    pixels = n // models * out_height * out_width
    deep, block_o = min(64, max(16, power_of_two(channels))), min(128, max(16, power_of_two(outputs)))
    block = 128
    _conv[(-(-pixels // block), models, -(-outputs // block_o))](
        x, w, w if bias is None else bias.contiguous(), out, pixels, height, width, out_height, out_width, channels,
        outputs, *size, stride, *padding, dilation, bias is not None, block, deep, block_o,
        num_warps=8 if block_o >= 128 else 4, num_stages=4 if deep <= 32 else 3,
    )  # fmt: skip
    return out
