"""Kernel gradients of block-circulant convolutions, one per row, summed over wrapped diagonals.

With b×b blocks, output channels (p, r) and input channels (q, c), the gradient of a free parameter is

    g[i, p, s, t, q] = Σ_r G[i, (p, r), t, (q, (r + s) mod b)]

of the dense gradient G at every tap t. `fold` reads a G that was formed. `gradients` forms g at once: channels of x and d are
put in the order (place in a block, block), and then

    g[i, p, t, (s, q)] = Σ over r and output pixels u of  d[i, u, (r, p)] · x[i, u·stride + t·dilation − pad, (s + r mod b, q)],

a matrix product of depth b·pixels whose operands are runs of memory: as many flops as G, and a b-th of the bytes. Sums are
float32, rounded once. Either way memory holds [O/b, b·taps, C/b], blocks of inputs innermost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two

Pair = tuple[int, int]

#: output blocks that fill the matrix units
ENOUGH = 32


def reference_fold(dense: Tensor, block: int, taps: int, inputs: int) -> Tensor:
    """[N, O/b, b·taps, C/b] from dense gradients [N, O, taps·C and perhaps some zeros]; channels are padded to whole blocks."""
    n, outputs = dense.shape[:2]
    b, p, q = block, -(-outputs // block), -(-inputs // block)
    cells = dense[..., : taps * inputs].unflatten(2, (taps, inputs))
    if p * b > outputs or q * b > inputs:
        cells = F.pad(cells, (0, q * b - inputs, 0, 0, 0, p * b - outputs))
    cells = cells.reshape(n, p, b, taps, q, b).permute(0, 1, 3, 4, 2, 5)  # [N, p, taps, q, r, c]
    place = torch.arange(b, device=dense.device)
    at = ((place[:, None] + place) % b).expand(cells.shape)
    wide = cells.gather(5, at).sum(4, dtype=torch.promote_types(dense.dtype, torch.float32))  # [N, p, taps, q, s]
    return wide.permute(0, 1, 4, 2, 3).flatten(2, 3).to(dense.dtype)


def reference_gradients(
    x: Tensor, d: Tensor, block: int, size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:  # fmt: skip
    """[N, O/b, b·taps, C/b] by unfolding."""
    n, channels = x.shape[:2]
    windows = F.unfold(x, size, dilation, padding, stride).view(n, channels, size[0] * size[1], -1)
    dense = torch.einsum("nop,nctp->notc", d.flatten(2), windows)
    return reference_fold(dense.flatten(2), block, size[0] * size[1], channels)


def worth_it(x: Tensor, outputs: int, block: int) -> bool:
    """16 bits, whole blocks, and enough of them for the matrix units; else G is small beside the maps, and can be formed."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    whole = x.shape[1] % block == 0 and outputs % block == 0
    return half and whole and x.numel() > 0 and outputs >= ENOUGH * block and x.shape[1] >= 16 * block


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _fold(
        dense, out, O: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, P: tl.constexpr,
        Q: tl.constexpr, B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, one block of outputs; every entry is read once."""
        n = tl.program_id(0).to(tl.int64)
        p = tl.program_id(1)
        q = tl.arange(0, BLOCK_Q)[:, None]
        s = tl.arange(0, BLOCK_S)[None, :]
        inside = (q < Q) & (s < B)
        source = dense + (n * O + p * B) * WIDTH
        target = out + (n * P + p) * (B * TAPS * Q) + s * (TAPS * Q) + q
        for tap in range(TAPS):
            total = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
            for r in tl.static_range(B):
                c = q * B + (s + r) % B
                real = inside & (c < tl.where(p * B + r < O, C, 0))
                total += tl.load(source + r * WIDTH + tap * C + c, mask=real, other=0.0).to(tl.float32)
            tl.store(target + tap * Q, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _gradient(
        x, d, out, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
        B: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
        PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, one tap, a tile of blocks of outputs and of channels (s, q)."""
        row_id = tl.program_id(1).to(tl.int64)
        ACROSS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
        DOWN: tl.constexpr = (B * Q + BLOCK_C - 1) // BLOCK_C
        TOKENS: tl.constexpr = HO * WO
        tap = tl.program_id(0) // (ACROSS * DOWN)
        place = tl.program_id(0) % (ACROSS * DOWN)
        p = (place // DOWN) * BLOCK_P + tl.arange(0, BLOCK_P)
        j = (place % DOWN) * BLOCK_C + tl.arange(0, BLOCK_C)
        left = d + row_id * (TOKENS * B * P)
        right = x + row_id * (H * W * B * Q)
        total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for start in range(0, B * TOKENS, BLOCK):
            k = start + tl.arange(0, BLOCK)
            here = k < B * TOKENS
            r = k // TOKENS
            t = k % TOKENS
            row = (t // WO) * SH + (tap // KW) * DH - PH
            col = (t % WO) * SW + (tap % KW) * DW - PW
            real = here & (row >= 0) & (row < H) & (col >= 0) & (col < W)
            dv = tl.load(
                left + (t * (B * P) + r * P)[:, None] + p[None, :], mask=here[:, None] & (p < P)[None, :], other=0.0
            )
            turned = (j[None, :] + (r * Q)[:, None]) % (B * Q)
            pixel = right + ((row * W + col) * (B * Q))[:, None]
            xv = tl.load(pixel + turned, mask=real[:, None] & (j < B * Q)[None, :], other=0.0)
            total = tl.dot(tl.trans(dv), xv, total)
        at = (p[:, None] * (B * KH * KW) + (j // Q)[None, :] * (KH * KW) + tap) * Q + (j % Q)[None, :]
        both = (p < P)[:, None] & (j < B * Q)[None, :]
        tl.store(out + row_id * (P * B * KH * KW * Q) + at, total.to(out.dtype.element_ty), mask=both)


def fold(dense: Tensor, block: int, taps: int, inputs: int) -> Tensor:
    """As `reference_fold`, for contiguous rows."""
    n, outputs, width = dense.shape
    p, q = -(-outputs // block), -(-inputs // block)
    out = torch.empty(n, p, block * taps, q, device=dense.device, dtype=dense.dtype)
    block_q, block_s = power_of_two(q), power_of_two(block)
    warps = max(1, min(8, block_q * block_s // 64))
    _fold[(n, p)](dense, out, outputs, inputs, width, taps, p, q, block, block_q, block_s, num_warps=warps)
    return out


def by_place(maps: Tensor, block: int) -> Tensor:
    """Channels (q, c) of channels-last maps [N, C, H, W] in the order (c, q)."""
    pixels = maps.permute(0, 2, 3, 1).unflatten(3, (-1, block)).transpose(3, 4)
    return pixels.flatten(3).permute(0, 3, 1, 2)


def gradients(x: Tensor, d: Tensor, block: int, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """As `reference_gradients`, in the type of d, where it is `worth_it`."""
    (n, channels, height, width), (_, outputs, out_height, out_width) = x.shape, d.shape
    p, q, taps = outputs // block, channels // block, size[0] * size[1]
    x, d = (by_place(t, block).contiguous(memory_format=torch.channels_last) for t in (x, d))
    out = torch.empty(n, p, block * taps, q, device=x.device, dtype=d.dtype)
    block_p, block_c = min(128, power_of_two(p)), 128 if channels % 128 == 0 else 64
    grid = (taps * -(-p // block_p) * -(-channels // block_c), n)
    _gradient[grid](
        x, d, out, height, width, out_height, out_width, p, q, block, *size, *stride, *padding, *dilation, block_p, block_c,
        min(64, max(16, power_of_two(block * out_height * out_width))), num_warps=8 if block_p * block_c > 8192 else 4,
        num_stages=3,
    )  # fmt: skip
    return out
