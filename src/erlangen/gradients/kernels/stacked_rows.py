"""Norms and weighted sums of the rows of many models, each in one pass over the gradients as they were stored.

    energy[e, i] = ‖g[e, i] / m[e]‖²,   sum[e] = Σ_i w[e, i]·g[e, i]

Both read the same stored values, of whatever precision, and compute in float32: what is measured is what is summed. A
row of weight zero (padding, or one that held a NaN) is never read into the sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two
from erlangen.gradients.sums import squared_norms


def reference_energy(g: Tensor, metric: Tensor | None = None) -> Tensor:
    """[E, P] float64 from g [E, P, d] and metric [E, d]."""
    scaled = g if metric is None else g / metric[:, None]
    return squared_norms(scaled.flatten(0, 1)).double().unflatten(0, g.shape[:2])


def reference_sum(w: Tensor, g: Tensor) -> Tensor:
    """[E, d] from weights [E, P]: a row of weight zero becomes all NaN, which nansum takes for zero.

    Not a matrix product: one in reduced precision would round the weights past the bound.
    """
    return (g * w.masked_fill(w == 0, math.nan)[..., None]).nansum(1)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _energy(g, metric, out, columns, rows, pitch, METRIC: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
        """One program: one row. float32 adds RUN squares at most, float64 the runs: small entries count beside large ones."""
        n = tl.program_id(0).to(tl.int64)
        base = g + n * columns
        scale = metric + (n // rows) * pitch
        j = tl.arange(0, BLOCK)
        wide = tl.sum(tl.zeros([BLOCK], tl.float32), 0).to(tl.float64)
        for run in range(0, columns, BLOCK * RUN):
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(run, tl.minimum(run + BLOCK * RUN, columns), BLOCK):
                c = start + j
                inside = c < columns
                v = tl.load(base + c, mask=inside, other=0.0).to(tl.float32)
                if METRIC:
                    v = v / tl.load(scale + c, mask=inside, other=1.0)
                total += v * v
            wide += tl.sum(total, 0).to(tl.float64)
        tl.store(out + n, wide)

    @triton.jit
    def _sum(w, g, out, rows, columns, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        """One program: ``part`` rows of one model, BLOCK columns, ROWS at a time."""
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = c < columns
        model = tl.program_id(1).to(tl.int64)
        first = tl.program_id(2) * part
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, part, ROWS):
            r = first + start + tl.arange(0, ROWS)
            here = (r < rows) & (start + tl.arange(0, ROWS) < part)
            weight = tl.load(w + model * rows + r, mask=here, other=0.0)
            read = (weight != 0)[:, None] & inside[None, :]
            at = (model * rows + r)[:, None] * columns + c[None, :]
            total += weight[:, None] * tl.load(g + at, mask=read, other=0.0).to(tl.float32)
        place = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        tl.store(out + place * columns + c, tl.sum(total, 0), mask=inside)


def energy(g: Tensor, metric: Tensor | None = None) -> Tensor:
    """As `reference_energy`; g contiguous, metric float32 with rows of any pitch."""
    models, rows, columns = g.shape
    out = torch.empty(models, rows, device=g.device, dtype=torch.float64)
    if metric is not None and metric.stride(1) != 1:
        metric = metric.contiguous()
    block = min(4096, max(16, power_of_two(columns)))
    _energy[(models * rows,)](
        g, out if metric is None else metric, out, columns, rows, 0 if metric is None else metric.stride(0),
        metric is not None, block, 16, num_warps=8 if block > 1024 else 4,
    )  # fmt: skip
    return out


def weighted_sum(w: Tensor, g: Tensor) -> Tensor:
    """As `reference_sum`, float32; g and w contiguous, w float32."""
    models, rows, columns = g.shape
    block = min(512, max(16, power_of_two(columns)))
    across = -(-columns // block)
    parts = max(1, min(-(-rows // 32), 2048 // (across * models) + 1))
    part = -(-rows // parts)
    parts = -(-rows // part)
    out = torch.empty(parts, models, columns, device=g.device, dtype=torch.float32)
    _sum[(across, models, parts)](w, g, out, rows, columns, part, 8, block, num_warps=4)
    return out.sum(0) if parts > 1 else out[0]
