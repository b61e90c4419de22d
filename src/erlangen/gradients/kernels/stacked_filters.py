"""The guarded norms of filtered kernels of many models, in one pass over the gradients as they were stored.

    energy[e, i] = share[e]·‖g[e, i]‖² + ‖g[e, i]·B[e]‖²

A gradient is groups of K entries, each multiplied by the columns B [K, J] of its model: with the K taps of a kernel as a
group, B the kept frequencies and share = κ², this is ‖(P + κ²I)^½ g‖² (see `Fourier.weight`). No term is negative, so nothing
cancels: what a filter removes still counts by its share, and a row that is not finite has no finite energy.

Memory holds [outputs, K·channels and some zeros], channels innermost; with one channel that is K consecutive entries. The
products and up to K·J squares of a group are float32, groups are added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON
from erlangen.gradients.pieces import chunk_size
from erlangen.gradients.precision import accumulate_dtype, exact_float32
from erlangen.gradients.sums import squared_norms

#: entries of a group that one thread holds
MOST = 64


@dataclass(frozen=True)
class Groups:
    """Where the entries of a group lie in a row: [outputs, width], the first ``size·channels`` of which are [size, channels]."""

    outputs: int
    size: int
    channels: int
    width: int


def reference(g: Tensor, share: Tensor, columns: Tensor, groups: Groups) -> Tensor:
    """[E, P] float64 from g [E, P, outputs·width], share [E] and columns [E, K, J]; some rows at a time, for memory."""
    models, rows, entries = g.shape
    step = chunk_size(entries, g)
    together = max(1, step // max(1, rows))
    found = torch.empty(models, rows, device=g.device, dtype=torch.float64)
    for e in range(0, models, together):
        few = slice(e, e + together)
        for start in range(0, rows, step):
            here = slice(start, start + step)
            found[few, here] = _energy(g[few, here], share[few], columns[few], groups)
    return found


def _energy(g: Tensor, share: Tensor, columns: Tensor, groups: Groups) -> Tensor:
    """The energies of rows that fit into memory in float32, three times."""
    wide = g.to(accumulate_dtype(g)).unflatten(2, (groups.outputs, groups.width))
    taps = wide[..., : groups.size * groups.channels].unflatten(3, (groups.size, groups.channels))
    with exact_float32():
        turned = taps.transpose(3, 4).flatten(1, 3) @ columns.to(wide.dtype)
    own, seen = (squared_norms(t.reshape(g.shape[0] * g.shape[1], -1)).double() for t in (taps, turned))
    return share[:, None] * own.view(g.shape[:2]) + seen.view(g.shape[:2])


def fits(g: Tensor, groups: Groups) -> bool:
    return groups.size <= MOST and g.dtype in (torch.bfloat16, torch.float16, torch.float32) and g.numel() > 0


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _filtered(
        g, share, columns, out, rows, pitch, groups, C: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
        J: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, BLOCK groups at a time; their entries are read from memory once, and named for each of the J
        columns. TOGETHER of these are unrolled: the compiler would have all of B in registers, and has not so many."""
        n = tl.program_id(0).to(tl.int64)
        base = g + n * pitch
        model = n // rows
        filters = columns + model * (K * J)
        own = tl.load(share + model)
        wide = tl.zeros([BLOCK], tl.float64)
        for start in range(0, groups, BLOCK):
            m = start + tl.arange(0, BLOCK)
            inside = m < groups
            at = base + (m // C) * WIDTH + m % C
            whole = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(K):
                v = tl.load(at + i * C, mask=inside, other=0.0).to(tl.float32)
                whole += v * v
            total = own * whole
            for first in range(0, J, TOGETHER):
                for j in tl.static_range(TOGETHER):
                    z = tl.zeros([BLOCK], tl.float32)
                    for i in tl.static_range(K):
                        v = tl.load(at + i * C, mask=inside, other=0.0).to(tl.float32)
                        z += v * tl.load(filters + (first + j) * K + i)
                    total += z * z
            wide += total.to(tl.float64)
        tl.store(out + n, tl.sum(wide, 0))


def filtered_energy(g: Tensor, share: Tensor, columns: Tensor, groups: Groups) -> Tensor:
    """As `reference`; g contiguous, share and columns float32."""
    models, rows, entries = g.shape
    out = torch.empty(models, rows, device=g.device, dtype=torch.float64)
    size, count = groups.size, groups.outputs * groups.channels
    together = min(columns.shape[2], max(1, 128 // size))
    columns = F.pad(columns, (0, -columns.shape[2] % together)).mT.contiguous()  # [E, J, K]
    held = 8 if size <= 12 else 4 if size <= 36 else 2  # groups of a thread: all their entries are registers
    warps = 4 if count > 32 * held else 1
    _filtered[(models * rows,)](
        g, share, columns, out, rows, entries, count, groups.channels, groups.width, size, columns.shape[1], together,
        32 * held * warps, num_warps=warps,
    )  # fmt: skip
    return out
