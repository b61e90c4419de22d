"""Kernel gradients of a steerable convolution, one per row, in the order in which its basis wants them.

    g[i, f, o, t, c] = Σ over output pixels p of  d[i, p, o] · x[i, p·stride + t·dilation − pad, f·D + c]

for every input field f of D components c. All taps of one field are the columns of one product, so that cotangents are
read once per field, and everything that one pair of fields contributes to its coefficients lies together: with output
channels (field, component) the result is a matrix [rows · fields in · fields out, components · taps · D], to be multiplied
by the basis. Sums are float32, rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two

Pair = tuple[int, int]


def reference(x: Tensor, d: Tensor, components: int, size: Pair, stride: int, padding: int, dilation: int) -> Tensor:
    """[n, fields, O, taps·D] by unfolding."""
    n, channels = x.shape[:2]
    windows = F.unfold(x, size, dilation, padding, stride).view(
        n, channels // components, components, size[0] * size[1], -1
    )
    return torch.einsum("nop,nfctp->nfotc", d.flatten(2), windows).flatten(3)


def fits(x: Tensor, outputs: int, components: int, taps: int) -> bool:
    """16 bits, runs of memory long enough to load at once, and taps of a field that one program holds."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and x.numel() > 0 and outputs >= 16 and components in (4, 8, 16) and 16 <= taps * components <= 256


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _fields(
        x, d, out, TOKENS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, WO: tl.constexpr, C: tl.constexpr,
        O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, S: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
        FIELDS: tl.constexpr, D: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, one input field, BLOCK_O output channels, all taps."""
        n = tl.program_id(0).to(tl.int64)
        field = tl.program_id(1) % FIELDS
        o = (tl.program_id(1) // FIELDS) * BLOCK_O + tl.arange(0, BLOCK_O)
        k = tl.arange(0, BLOCK_K)
        tap = k // D
        right = x + n * (H * W * C) + field * D
        left = d + n * (TOKENS * O)
        total = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
        for start in range(0, TOKENS, BLOCK):
            t = start + tl.arange(0, BLOCK)
            here = t < TOKENS
            row = ((t // WO) * S - P)[:, None] + ((tap // KW) * E)[None, :]
            col = ((t % WO) * S - P)[:, None] + ((tap % KW) * E)[None, :]
            real = here[:, None] & (k < KH * KW * D)[None, :] & (row >= 0) & (row < H) & (col >= 0) & (col < W)
            xv = tl.load(right + (row * W + col) * C + (k % D)[None, :], mask=real, other=0.0)
            dv = tl.load(left + t[:, None] * O + o[None, :], mask=here[:, None] & (o < O)[None, :], other=0.0)
            total = tl.dot(tl.trans(dv), xv, total)
        target = out + ((n * FIELDS + field) * O + o[:, None]) * (KH * KW * D) + k[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(o < O)[:, None] & (k < KH * KW * D)[None, :])


def gradients(x: Tensor, d: Tensor, components: int, size: Pair, stride: int, padding: int, dilation: int) -> Tensor:
    """As `reference`, in the type of d, for channels-last x and d."""
    x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    (n, channels, height, width), (_, outputs, out_height, out_width) = x.shape, d.shape
    fields, entries, tokens = channels // components, size[0] * size[1] * components, out_height * out_width
    out = torch.empty(n, fields, outputs, entries, device=x.device, dtype=d.dtype)
    block_k, block_o = max(16, power_of_two(entries)), min(64, max(16, power_of_two(outputs)))
    _fields[(n, fields * -(-outputs // block_o))](
        x, d, out, tokens, height, width, out_width, channels, outputs, *size, stride, padding, dilation, fields,
        components, block_o, block_k, min(64, max(16, power_of_two(tokens))),
        num_warps=8 if block_o * block_k > 64 * 128 else 4, num_stages=2,
    )  # fmt: skip
    return out
