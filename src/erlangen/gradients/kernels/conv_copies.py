"""Coefficient gradients of a convolution whose kernel holds every coefficient several times; kernel gradients are not stored.

    g[i, f, q] = Σ over copies h of  K[i, (f, h), e(h, q)],    K[i, o, e] as in `conv_gradient`, e an entry of [taps × channels]

The d rows (f, h) of an output field hold the same coefficients, each in an order of its own. Entries that all copies only
exchange among themselves lie in one block of ``width`` columns: so a program that forms the rows of some fields and one block of
columns has all copies of its coefficients in hand. It exchanges columns and adds up the rows, and a d-th of what it formed
goes to memory, rounded once, to the type of the cotangent. To store kernel gradients and to read them again costs as much as
half of the products where positions are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, ROWS, conv_gradient, power_of_two, tuned

Pair = tuple[int, int]

#: rows of kernel gradients that a program forms at most
MOST_ROWS = 128


def reference(
    x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, columns: Tensor,
    local: Tensor, width: int,
) -> Tensor:  # fmt: skip
    """[n, fields, L], in the precision of the operands. ``columns`` [L] are entries of [taps × channels] in blocks of ``width``,
    ``local`` [copies, L up to a multiple of the width] where in its block a copy has the coefficient of each place."""
    kernels = conv_gradient.reference(x, d, views, kernel, stride, padding, dilation).flatten(2)
    copies, length = len(local), len(columns)
    rows = kernels[..., columns.long()].unflatten(1, (-1, copies))  # [n, fields, copies, L]
    place = torch.arange(length, device=x.device) // width * width + local[:, :length].long()
    return rows.gather(3, place.expand(rows.shape)).sum(2)


def fits(fields: int, copies: int) -> bool:
    """Whether rows of whole fields are tiles: a power of two of copies, and enough of them for the matrix units."""
    return copies == power_of_two(copies) and copies <= MOST_ROWS and power_of_two(fields) * copies >= 16


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _copies(
        x, d, out, columns, local, tokens, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        C: tl.constexpr, FIELDS: tl.constexpr, COPIES: tl.constexpr, LENGTH: tl.constexpr, KW: tl.constexpr,
        SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
        VIEWS: tl.constexpr, TILE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK: tl.constexpr,
        VECTOR: tl.constexpr,
    ):  # fmt: skip
        """One program: TILE fields with all their rows, one block of columns. VECTOR columns lie side by side in memory."""
        owner = tl.program_id(1).to(tl.int64)
        O: tl.constexpr = FIELDS * COPIES
        ACROSS: tl.constexpr = (FIELDS + TILE - 1) // TILE
        SAME: tl.constexpr = (SH == 1) and (SW == 1) and (HO == H) and (WO == W)
        first = (tl.program_id(0) % ACROSS) * TILE
        jo = tl.arange(0, BLOCK_F * COPIES)
        o = first * COPIES + jo
        in_o = (jo < TILE * COPIES) & (o < O)
        place = (tl.program_id(0) // ACROSS) * BLOCK_J + tl.arange(0, BLOCK_J)
        in_j = tl.max_constancy(place < LENGTH, VECTOR)
        j = tl.load(columns + place, mask=place < LENGTH, other=0)
        tap = j // C
        down = tl.max_constancy((tap // KW) * DH - PH, VECTOR)
        right = tl.max_constancy((tap % KW) * DW - PW, VECTOR)
        shift = tl.max_contiguous(tl.multiple_of((down * W + right) * C + j - tap * C, VECTOR), VECTOR)
        cotangents = d + owner * tokens * O
        images = x + owner * VIEWS * H * W * C
        k = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK_F * COPIES, BLOCK_J], tl.float32)
        for start in range(0, tokens, BLOCK):
            t = start + k
            here = t < tokens
            top = ((t // WO) % HO) * SH
            left = ((k if BLOCK % WO == 0 else t) % WO) * SW
            at = t if SAME else ((t // (HO * WO)) * H + top) * W + left
            row = top[:, None] + down[None, :]
            col = left[:, None] + right[None, :]
            here_x = here[:, None] & in_j[None, :] & (row >= 0) & (row < H) & (col >= 0) & (col < W)
            dv = tl.load(cotangents + t[:, None] * O + o[None, :], mask=here[:, None] & in_o[None, :], other=0.0)
            xv = tl.load(images + at[:, None] * C + shift[None, :], mask=here_x, other=0.0)
            total = tl.dot(tl.trans(dv), xv, total)
        ROOM: tl.constexpr = (LENGTH + BLOCK_J - 1) // BLOCK_J * BLOCK_J
        found = tl.load(local + (jo % COPIES)[:, None] * ROOM + place[None, :])
        sums = tl.sum(tl.reshape(tl.gather(total, found, 1), [BLOCK_F, COPIES, BLOCK_J]), 1)
        jf = tl.arange(0, BLOCK_F)
        f = first + jf
        kept = ((jf < TILE) & (f < FIELDS))[:, None] & (place < LENGTH)[None, :]
        tl.store(out + (owner * FIELDS + f[:, None]) * LENGTH + place[None, :], sums.to(out.dtype.element_ty), mask=kept)


def conv_copies(
    x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, columns: Tensor,
    local: Tensor, width: int, vector: int, setting: tuned.Copies,
) -> Tensor:  # fmt: skip
    """As `reference`, in the type of the cotangent. x [n·views, C, H, W] and d [n·views, fields·copies, H', W'] are channels-last,
    ``columns`` and ``local`` int32; ``vector`` columns, a power of two, lie side by side, and begin at a multiple of it."""
    if len(d) > ROWS * views:
        parts = zip(x.split(ROWS * views), d.split(ROWS * views), strict=True)
        given = views, kernel, stride, padding, dilation, columns, local, width, vector, setting
        return torch.cat([conv_copies(a, b, *given) for a, b in parts])
    (_, channels, height, width_x), (rows, outputs, out_height, out_width) = x.shape, d.shape
    copies, length, owners = len(local), len(columns), rows // views
    fields, tokens = outputs // copies, views * out_height * out_width
    x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    out = torch.empty(owners, fields, length, device=x.device, dtype=d.dtype)
    across = -(-fields * copies // MOST_ROWS)
    tile = -(-fields // across)
    block_f, block = max(power_of_two(tile), 16 // copies), min(setting.block, max(16, power_of_two(tokens)))
    stages = conv_gradient.stages_of(setting.stages, block * (block_f * copies + width), x)
    _copies[(-(-fields // tile) * -(-length // width), owners)](
        x, d, out, columns, local, tokens, height, width_x, out_height, out_width, channels, fields, copies, length, kernel[1],
        *stride, *padding, *dilation, views, tile, block_f, width, block, vector, num_warps=setting.warps, num_stages=stages,
    )  # fmt: skip
    return out
