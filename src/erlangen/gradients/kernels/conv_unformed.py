"""Norms and weighted sum of a convolution's per-owner kernel gradients, which are never stored.

A layer of 256 → 256 channels on an 8×8 map has 590 thousand weights and 64 positions: to write every owner's gradient in
16 bits and read it once moves 2.4 MB an owner, for 75 million flops. Here the squared norms come from the Gram matrices
of windows and cotangents, T×T for T positions, and the sum forms each owner's product again, weighs it and forgets it:

    ‖g_i‖² = Σ_{t,s} ⟨a_t, a_s⟩⟨d_t, d_s⟩,        Σ_i w_i g_i = Σ_i w_i (Σ_t d_t ⊗ a_t).

What is guaranteed. Let P_i be the product that `weighted_sum` multiplies by w_i, in float32, and N_i² what
`squared_norms` returns: then ‖P_i‖ ≤ N_i, whatever the operands hold, or N_i is not finite. Products of 16-bit operands
are exact in float32, so only sums err. One step of the matrix units adds 16 products to an accumulator with an error of
at most u = 2⁻²⁰ of the magnitudes added (17 terms, each cut at 2⁻²⁵ of the largest or better). With M = Σ_t ‖d_t‖‖a_t‖,

- P_i errs from g_i by at most (T/16)·u·M, because ‖Σ_t |d_t| ⊗ |a_t|‖ ≤ M;
- each entry of a Gram matrix errs by at most (K/16)·u·‖a_t‖‖a_s‖, K the channels of one product, and the float32
  additions of products, entries and rows by less than what `_units` grants them, so ‖g_i‖² errs by as many units of M²;
- squares of entries below 2⁻⁶² may vanish: they hide at most δ = T·2⁻⁶²·√(taps·C + O)·(max‖a_t‖ + max‖d_t‖) of g_i;

and N² = value + units·u·M² + 2²⁰·δ² covers all three. M is a few times ‖g‖ (√T for unrelated positions): the norm comes out
larger than it is by one or two parts in a thousand at most, and clipping is that much stronger.

An owner of weight zero is not read: what it holds, NaN included, cannot reach the sum. Sums over owners are split into a
fixed number of parts, added in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two, tuned

Pair = tuple[int, int]

#: positions (times views) of an owner: its Gram matrices stay in registers
MOST_TOKENS = 128
#: flops of the matrix units in the time in which one byte crosses memory; an H200 does 400 TF/s or more and 4.4 TB/s here
FLOPS_PER_BYTE = 90
#: what weighing an owner's product costs, in positions of the product itself
WEIGHING = 16
#: error of one step of the matrix units
STEP_ERROR = 2.0**-20


def cheaper(tokens: int, channels: int, outputs: int) -> bool:
    """Whether flops twice cost less than bytes. Per weight: Gram matrices T²/O and the weighing, two flops each, against
    16 bits written and read. Few channels make small gradients, and leave the matrix units idle. A measurement on this
    device that says otherwise has the last word."""
    if tokens > MOST_TOKENS or min(channels, outputs) < 64:
        return False
    flops, moved = 2 * (tokens**2 / outputs + WEIGHING), 4
    return flops < FLOPS_PER_BYTE * moved and not tuned.weighing(padded(tokens), outputs, channels).stored


def padded(tokens: int) -> int:
    """Positions rounded up to a power of two, as the kernels hold them."""
    return max(16, power_of_two(tokens))


def reference(
    x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(‖g‖², M) of every owner, [n] each, by unfolding in float64. With ``inverse`` [O], those of the gradients of
    filters that were centred and multiplied by it: (g_o − mean g_o)·inverse_o; M is then taken before centring."""
    owners = len(x) // views
    windows = F.unfold(x.double(), kernel, dilation, padding, stride).mT.reshape(
        owners, -1, x.shape[1] * math.prod(kernel)
    )
    cotangents = d.double().flatten(2).mT.reshape(owners, -1, d.shape[1])
    cotangents = cotangents if inverse is None else cotangents * inverse.double()
    g = torch.einsum("nto,ntk->nok", cotangents, windows)
    g = g if inverse is None else g - g.mean(2, keepdim=True)
    return g.square().sum((1, 2)), (cotangents.norm(dim=2) * windows.norm(dim=2)).sum(1)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _place(
        t, tap, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
        SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    ):  # fmt: skip
        """Which pixel of an owner's maps the tap of window t reads, and whether there is one."""
        row = ((t // WO) % HO) * SH + (tap // KW) * DH - PH
        col = (t % WO) * SW + (tap % KW) * DW - PW
        return ((t // (HO * WO)) * H + row) * W + col, (row >= 0) & (row < H) & (col >= 0) & (col < W)

    @triton.jit
    def _norms(
        x, d, inverse, out, units, floor, TOKENS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr,
        WO: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
        SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, VIEWS: tl.constexpr,
        CENTRED: tl.constexpr, BLOCK: tl.constexpr, DEEP_C: tl.constexpr, DEEP_O: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """One program: one owner."""
        owner = tl.program_id(0).to(tl.int64)
        left = d + owner * TOKENS * O
        right = x + owner * VIEWS * H * W * C
        t = tl.arange(0, BLOCK)
        here = t < TOKENS
        STEPS: tl.constexpr = (C + DEEP_C - 1) // DEEP_C
        gram_a = tl.zeros([BLOCK, BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(KH * KW * STEPS):
            at, inside = _place(t, step // STEPS, H, W, HO, WO, KW, SH, SW, PH, PW, DH, DW)
            c = (step % STEPS) * DEEP_C + tl.arange(0, DEEP_C)
            a = tl.load(
                right + at[:, None] * C + c[None, :], mask=(here & inside)[:, None] & (c < C)[None, :], other=0.0
            )
            gram_a += tl.dot(a, tl.trans(a))  # a fresh accumulator each time: errors of few steps only
            if CENTRED:
                total += tl.sum(a.to(tl.float32), 1)
        gram_d = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, O, DEEP_O):
            o = start + tl.arange(0, DEEP_O)
            v = tl.load(left + t[:, None] * O + o[None, :], mask=here[:, None] & (o < O)[None, :], other=0.0)
            if CENTRED:
                scaled = v.to(tl.float32) * tl.load(inverse + o, mask=o < O, other=0.0)[None, :]
                gram_d += tl.dot(scaled, tl.trans(scaled), input_precision=EXACT)
            else:
                gram_d += tl.dot(v, tl.trans(v))
        diagonal = t[:, None] == t[None, :]
        own_a = tl.sum(tl.where(diagonal, gram_a, 0.0), 1)
        own_d = tl.sum(tl.where(diagonal, gram_d, 0.0), 1)
        magnitude = tl.sum(tl.sqrt(own_a) * tl.sqrt(own_d), 0)
        if CENTRED:
            gram_a -= total[:, None] * (total / (KH * KW * C))[None, :]
        value = tl.sum(tl.sum(gram_a * gram_d, 1), 0)
        value = tl.where(value < 0, 0.0, value)  # a NaN stays one
        value += units * magnitude * magnitude + floor * (tl.max(own_a, 0) + tl.max(own_d, 0))
        tl.store(out + owner, value)

    @triton.jit
    def _weighted(
        x, d, w, out, owners, part, TOKENS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr,
        WO: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
        SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, VIEWS: tl.constexpr,
        BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: a tile of (o, c) for one tap, summed over ``part`` owners."""
        ACROSS: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
        DOWN: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
        tap = tl.program_id(0) // (ACROSS * DOWN)
        place = tl.program_id(0) % (ACROSS * DOWN)
        o = (place // DOWN) * BLOCK_O + tl.arange(0, BLOCK_O)
        c = (place % DOWN) * BLOCK_C + tl.arange(0, BLOCK_C)
        t = tl.arange(0, BLOCK)
        at, inside = _place(t, tap, H, W, HO, WO, KW, SH, SW, PH, PW, DH, DW)
        left = t[:, None] * O + o[None, :]
        right = at[:, None] * C + c[None, :]
        first = tl.program_id(1) * part
        total = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
        for i in range(first, tl.minimum(first + part, owners)):
            owner = tl.cast(i, tl.int64)
            weight = tl.load(w + owner)
            here = t < tl.where(weight != 0, TOKENS, 0)
            dv = tl.load(d + owner * (TOKENS * O) + left, mask=here[:, None] & (o < O)[None, :], other=0.0)
            inner = (here & inside)[:, None] & (c < C)[None, :]
            xv = tl.load(x + owner * (VIEWS * H * W * C) + right, mask=inner, other=0.0)
            total += weight * tl.dot(tl.trans(dv), xv)
        target = out + ((tl.program_id(1).to(tl.int64) * O + o[:, None]) * (KH * KW) + tap) * C + c[None, :]
        tl.store(target, total, mask=(o < O)[:, None] & (c < C)[None, :])


def _units(tokens: int, deep: int, products: int, centred: bool) -> float:
    """Errors of ‖g‖² in units of STEP_ERROR·M²: the product twice (2‖g‖·error), both Gram matrices; 16 for the float32
    additions of entries and rows (each 1/16 of a unit) and what is hidden; where filters are centred, 32 for a sum of
    channels, twice, and for cotangents in three parts of TF32."""
    return 2 * -(-tokens // 16) + 2 * -(-deep // 16) + products / 8 + 16 + (32 if centred else 0)


def _outward(tokens: int, entries: int, outputs: int, deep: int, products: int, centred: bool) -> Pair:
    """(units·u, 2²⁰·δ²/max²) as the head of this file defines them."""
    hidden = 2.0**20 * (tokens * 2.0**-61) ** 2 * (entries + outputs)
    return _units(tokens, deep, products, centred) * STEP_ERROR, hidden  # type: ignore[return-value]


def squared_norms(
    x: Tensor, d: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    inverse: Tensor | None = None, *, rounded: bool = True, setting: tuned.Norms | None = None,
) -> Tensor:  # fmt: skip
    """N² of every owner, [n]: at least the squared norm of what `weighted_sum` adds up; see the head of this file.

    x is [n·views, C, H, W], d is [n·views, O, H', W'], both channels-last. With ``inverse`` [O], entries in (0, 1]: of the
    gradients of centred filters, as `reference`. Without ``rounded``, the value as it was computed.
    """
    (_, channels, height, width), (rows, outputs, out_height, out_width) = x.shape, d.shape
    owners, taps, tokens = rows // views, kernel[0] * kernel[1], views * out_height * out_width
    x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    block = padded(tokens)
    setting = tuned.norms(block) if setting is None else setting
    centred = inverse is not None
    deep_c = min(setting.depth, max(16, power_of_two(channels)))
    deep_o = min(32 if centred else setting.depth, max(16, power_of_two(outputs)))  # three parts of TF32 need registers
    products = taps * -(-channels // deep_c) + -(-outputs // deep_o)
    units, floor = _outward(tokens, taps * channels, outputs, max(deep_c, deep_o), products, centred)
    out = torch.empty(owners, device=x.device, dtype=torch.float32)
    _norms[(owners,)](
        x, d, out if inverse is None else inverse.float().contiguous(), out, *((units, floor) if rounded else (0.0, 0.0)),
        tokens, height, width, out_height, out_width, channels, outputs, *kernel, *stride, *padding, *dilation, views,
        centred, block, deep_c, deep_o, "tf32x3", num_warps=setting.warps, num_stages=setting.stages,
    )  # fmt: skip
    return out


def weighted_sum(
    x: Tensor, d: Tensor, w: Tensor, views: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    *, setting: tuned.Sum | None = None,
) -> Tensor:  # fmt: skip
    """Σ_i w_i g_i as [O, taps, C] float32; owners of weight zero are not read."""
    (_, channels, height, width), (rows, outputs, out_height, out_width) = x.shape, d.shape
    owners, taps, tokens = rows // views, kernel[0] * kernel[1], views * out_height * out_width
    x, d = (t.contiguous(memory_format=torch.channels_last) for t in (x, d))
    block = padded(tokens)
    setting = tuned.weighing(block, outputs, channels) if setting is None else setting
    tile_o = max(16, min(setting.outputs, power_of_two(outputs)))
    tile_c = max(16, min(setting.channels, power_of_two(channels)))
    tiles = taps * -(-outputs // tile_o) * -(-channels // tile_c)
    part = -(-owners // max(1, min(owners, setting.programs // tiles)))
    parts = -(-owners // part)
    out = torch.empty(parts, outputs, taps, channels, device=x.device, dtype=torch.float32)
    _weighted[(tiles, parts)](
        x, d, w.float().contiguous(), out, owners, part, tokens, height, width, out_height, out_width, channels, outputs,
        *kernel, *stride, *padding, *dilation, views, tile_o, tile_c, block, num_warps=setting.warps,
        num_stages=setting.stages,
    )  # fmt: skip
    return out.sum(0) if parts > 1 else out[0]
