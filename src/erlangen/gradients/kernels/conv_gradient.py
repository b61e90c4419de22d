"""Kernel gradients of a convolution, one per owner, without im2col.

    g[i, o, t, c] = Σ over views v and output pixels p of owner i of  d[i, v, p, o] · x[i, v, p·stride + t·dilation − pad, c]

One program forms one tile of (o, c) for one tap and owner, or of (o, tc) for columns of any taps: a matrix product over the
owner's pixels whose operands are read where they lie (channels-last). Sums are float32; the result is rounded once, to the
type of the cotangent, and the squared norms are those of the rounded values: what is measured is what will be summed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, ROWS, power_of_two, tuned, whole

Pair = tuple[int, int]

#: what the kernel sums up beside the gradients it stores
NOTHING, OWNERS, FILTERS = 0, 1, 2


def reference(x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """[n, O, taps, C] by unfolding, in the precision of the operands."""
    owners, channels = len(x) // views, x.shape[1]
    windows = F.unfold(x, kernel, dilation, padding, stride).view(len(x), channels, kernel[0] * kernel[1], -1)
    products = torch.einsum("rop,rctp->rotc", d.flatten(2), windows)
    return products.unflatten(0, (owners, views)).sum(1)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _energy(t):
        """Σ t² of what was stored, entries outside the tile being zero."""
        v = t.to(tl.float32)
        return tl.sum(tl.sum(v * v, 1), 0)

    @triton.jit
    def _by_filter(t):
        """(Σ t², Σ t) of every row."""
        v = t.to(tl.float32)
        return tl.sum(v * v, 1), tl.sum(v, 1)

    @triton.jit
    def _gradient(
        x, d, out, norms, tokens, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
        PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, VIEWS: tl.constexpr, TILE_O: tl.constexpr,
        BLOCK_O: tl.constexpr, TILE_C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
        NORMS: tl.constexpr,
    ):  # fmt: skip
        """ROW: one program forms the three taps of a kernel row, so that few channels still fill the matrix units."""
        owner = tl.program_id(1).to(tl.int64)
        ACROSS: tl.constexpr = (O + TILE_O - 1) // TILE_O
        DOWN: tl.constexpr = (C + TILE_C - 1) // TILE_C
        tap = tl.program_id(0) // (ACROSS * DOWN)
        place = tl.program_id(0) % (ACROSS * DOWN)
        jo = tl.arange(0, BLOCK_O)
        o = (place // DOWN) * TILE_O + jo
        in_o = (jo < TILE_O) & (o < O)
        jc = tl.arange(0, BLOCK_C)
        c = (place % DOWN) * TILE_C + jc
        in_c = (jc < TILE_C) & (c < C)
        left = d + owner * tokens * O
        right = x + owner * VIEWS * H * W * C
        target = out + (owner * O + o[:, None]) * (KH * KW * C) + c[None, :]
        both = in_o[:, None] & in_c[None, :]
        k = tl.arange(0, BLOCK)
        if ROW:
            a0 = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
            a1 = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
            a2 = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
            for start in range(0, tokens, BLOCK):
                t = start + k
                here = t < tokens
                row = ((t // WO) % HO) * SH + tap * DH - PH
                col = (t % WO) * SW - PW
                here_x = here & (row >= 0) & (row < H)
                base = right + (((t // (HO * WO)) * H + row) * W + col)[:, None] * C + c[None, :]
                dv = tl.load(left + t[:, None] * O + o[None, :], mask=here[:, None] & in_o[None, :], other=0.0)
                x0 = tl.load(base, mask=(here_x & (col >= 0) & (col < W))[:, None] & in_c[None, :], other=0.0)
                x1 = tl.load(
                    base + DW * C, mask=(here_x & (col + DW >= 0) & (col + DW < W))[:, None] & in_c[None, :], other=0.0
                )
                x2 = tl.load(
                    base + 2 * DW * C,
                    mask=(here_x & (col + 2 * DW >= 0) & (col + 2 * DW < W))[:, None] & in_c[None, :],
                    other=0.0,
                )
                turned = tl.trans(dv)
                a0 = tl.dot(turned, x0, a0)
                a1 = tl.dot(turned, x1, a1)
                a2 = tl.dot(turned, x2, a2)
            r0 = a0.to(out.dtype.element_ty)
            r1 = a1.to(out.dtype.element_ty)
            r2 = a2.to(out.dtype.element_ty)
            tl.store(target + tap * KW * C, r0, mask=both)
            tl.store(target + (tap * KW + 1) * C, r1, mask=both)
            tl.store(target + (tap * KW + 2) * C, r2, mask=both)
            if NORMS == 1:
                energy = _energy(r0) + _energy(r1) + _energy(r2)
            if NORMS == 2:
                e0, s0 = _by_filter(r0)
                e1, s1 = _by_filter(r1)
                e2, s2 = _by_filter(r2)
                energies = e0 + e1 + e2
                sums = s0 + s1 + s2
        else:
            total = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
            for start in range(0, tokens, BLOCK):
                t = start + k
                here = t < tokens
                row = ((t // WO) % HO) * SH + (tap // KW) * DH - PH
                col = (t % WO) * SW + (tap % KW) * DW - PW
                here_x = here & (row >= 0) & (row < H) & (col >= 0) & (col < W)
                base = right + (((t // (HO * WO)) * H + row) * W + col)[:, None] * C + c[None, :]
                dv = tl.load(left + t[:, None] * O + o[None, :], mask=here[:, None] & in_o[None, :], other=0.0)
                xv = tl.load(base, mask=here_x[:, None] & in_c[None, :], other=0.0)
                total = tl.dot(tl.trans(dv), xv, total)
            rounded = total.to(out.dtype.element_ty)
            tl.store(target + tap * C, rounded, mask=both)
            if NORMS == 1:
                energy = _energy(rounded)
            if NORMS == 2:
                energies, sums = _by_filter(rounded)
        if NORMS == 1:
            tl.store(norms + owner * tl.num_programs(0) + tl.program_id(0), energy)
        if NORMS == 2:
            slots = tl.num_programs(0) // ACROSS
            at = norms + (owner * slots + tap * DOWN + place % DOWN) * (2 * O) + o
            tl.store(at, energies, mask=in_o)
            tl.store(at + O, sums, mask=in_o)

    @triton.jit
    def _columns(
        x, d, out, norms, tokens, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
        C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
        PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, VIEWS: tl.constexpr, TILE_O: tl.constexpr,
        BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, NORMS: tl.constexpr,
    ):  # fmt: skip
        """Columns j of [taps × channels], whichever taps they belong to: where channels are no power of two, tiles of whole
        taps are padded and these are not. VECTOR columns, a power of two that divides C, lie side by side in memory."""
        owner = tl.program_id(1).to(tl.int64)
        J: tl.constexpr = KH * KW * C
        ACROSS: tl.constexpr = (O + TILE_O - 1) // TILE_O
        SAME: tl.constexpr = (SH == 1) and (SW == 1) and (HO == H) and (WO == W)
        jo = tl.arange(0, BLOCK_O)
        o = (tl.program_id(0) % ACROSS) * TILE_O + jo
        in_o = (jo < TILE_O) & (o < O)
        j = (tl.program_id(0) // ACROSS) * BLOCK_J + tl.arange(0, BLOCK_J)
        in_j = tl.max_constancy(j < J, VECTOR)
        tap = j // C
        down = tl.max_constancy((tap // KW) * DH - PH, VECTOR)
        right = tl.max_constancy((tap % KW) * DW - PW, VECTOR)
        shift = tl.max_contiguous(tl.multiple_of((down * W + right) * C + j - tap * C, VECTOR), VECTOR)
        cotangents = d + owner * tokens * O
        images = x + owner * VIEWS * H * W * C
        k = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK_O, BLOCK_J], tl.float32)
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
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + (owner * O + o[:, None]) * J + j[None, :], rounded, mask=in_o[:, None] & in_j[None, :])
        if NORMS == 1:
            tl.store(norms + owner * tl.num_programs(0) + tl.program_id(0), _energy(rounded))
        if NORMS == 2:
            energies, sums = _by_filter(rounded)
            slot = owner * (tl.num_programs(0) // ACROSS) + tl.program_id(0) // ACROSS
            tl.store(norms + slot * (2 * O) + o, energies, mask=in_o)
            tl.store(norms + slot * (2 * O) + O + o, sums, mask=in_o)


def _built_in(tokens: int, channels: int, kernel: Pair, area: int) -> tuned.Gradient:
    """Measured on an H200. Columns where tiles of whole taps would be padded by an eighth or more."""
    tile, block = _tile(channels, 128)
    if 8 * block >= 9 * tile and kernel != (1, 1) and tokens >= 256:
        small, large = tuned.Gradient(False, 128, 128, 32, 4, 5, True), tuned.Gradient(False, 128, 256, 32, 8, 6, True)
        return small if area <= 64 else large
    if channels <= 64 and kernel[1] == 3:
        return tuned.Gradient(True, 128, 128, 32, 4, 5)
    return tuned.Gradient(False, 128, 128, 32, 8, 4) if area <= 64 else tuned.Gradient(False, 128, 128, 64, 4, 3)


def _stages(setting: tuned.Gradient, tile: int, x: Tensor) -> int:
    """As many as the setting asks for, or as this device's memory for one program holds; ``tile``: entries that a stage reads."""
    if not x.is_cuda:
        return setting.stages
    room = getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 1 << 20)
    return max(1, min(setting.stages, room // (tile * x.element_size())))


def _tile(channels: int, most: int) -> Pair:
    """Equal tiles of at most ``most`` channels, and the power of two that holds one."""
    size = -(-channels // -(-channels // most))
    return size, max(16, power_of_two(size))


def worth_it(tokens: int, channels: int, outputs: int) -> bool:
    """Very few pixels or channels leave the matrix units idle: there im2col and a batched product are faster."""
    return tokens >= 16 and channels >= 16 and outputs >= 16


def conv_gradient(
    x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, norms: int = NOTHING,
    *, setting: tuned.Gradient | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[n, O, taps, C], and what is asked for beside it: of every owner ‖g‖² [n], or of its filters ‖g_o‖² and Σ g_o [n, 2, O].

    x is [n·views, C, H, W], d is [n·views, O, H', W'], both channels-last.
    """
    if len(d) > ROWS * views:
        parts = zip(x.split(ROWS * views), d.split(ROWS * views), strict=True)
        given_on = views, kernel, stride, padding, dilation, norms
        return whole(conv_gradient(a, b, *given_on, setting=setting) for a, b in parts)
    (_, channels, height, width), (rows, outputs, out_height, out_width) = x.shape, d.shape
    owners, taps = rows // views, kernel[0] * kernel[1]
    x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    out = torch.empty(owners, outputs, taps, channels, device=x.device, dtype=d.dtype)
    tokens = views * out_height * out_width
    setting = (
        setting
        or tuned.gradient(tokens, outputs, channels)
        or _built_in(tokens, channels, kernel, out_height * out_width)
    )
    by_row = setting.row and kernel[1] == 3
    (tile_o, block_o), (tile_c, block_c) = _tile(outputs, setting.outputs), _tile(channels, setting.channels)
    block = min(setting.block, max(16, power_of_two(tokens)))
    if setting.flat:
        block_c = min(setting.channels, max(16, power_of_two(taps * channels)))
        slots = -(-taps * channels // block_c)
    else:
        slots = (kernel[0] if by_row else taps) * -(-channels // tile_c)
    grid = (slots * -(-outputs // tile_o), owners)
    shape = {NOTHING: (0,), OWNERS: (grid[0],), FILTERS: (slots, 2, outputs)}[norms]
    beside = torch.empty(owners, *shape, device=x.device, dtype=torch.float32)
    given = (
        x, d, out, beside, tokens, height, width, out_height, out_width, channels, outputs, *kernel, *stride, *padding,
        *dilation, views, tile_o, block_o,
    )  # fmt: skip
    stages = _stages(setting, block * (block_o + (3 if by_row else 1) * block_c), x)
    runs = {"num_warps": setting.warps, "num_stages": stages}
    if setting.flat:
        _columns[grid](*given, block_c, block, min(8, channels & -channels), norms, **runs)
    else:
        _gradient[grid](*given, tile_c, block_c, block, by_row, norms, **runs)
    return out, beside.sum(1) if norms else beside
