"""Σ_i w_i g_i over the rows of a matrix, reading only rows whose weight is not zero.

A row that is padding, or that held a NaN and was given weight zero, is never read: 0·NaN cannot leak into the sum, and
the host need not look at the weights to be sure of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON


def reference(w: Tensor, g: Tensor) -> Tensor:
    """Σ_i w_i g_i, float32, rows of weight zero left out."""
    rows = torch.where((w == 0)[:, None], 0.0, g.float())
    return w.float() @ rows


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _row_sum(w, g, out, rows, columns, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        """One program: ``part`` rows of BLOCK columns, ROWS at a time."""
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = c < columns
        first = tl.program_id(1) * part
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, part, ROWS):
            r = first + start + tl.arange(0, ROWS)
            here = (r < rows) & (start + tl.arange(0, ROWS) < part)
            weight = tl.load(w + r, mask=here, other=0.0)
            read = (weight != 0)[:, None] & inside[None, :]
            value = tl.load(g + r.to(tl.int64)[:, None] * columns + c[None, :], mask=read, other=0.0).to(tl.float32)
            total += weight[:, None] * value
        tl.store(out + tl.program_id(1).to(tl.int64) * columns + c, tl.sum(total, 0), mask=inside)


def row_sum(w: Tensor, g: Tensor) -> Tensor:
    """As `reference`; g [n, d] contiguous, w [n] float32."""
    rows, columns = g.shape
    block = 512
    across = -(-columns // block)
    parts = max(1, min(-(-rows // 16), 1024 // across + 1))
    part = -(-rows // parts)
    parts = -(-rows // part)
    out = torch.empty(parts, columns, device=g.device, dtype=torch.float32)
    _row_sum[(across, parts)](w.float().contiguous(), g, out, rows, columns, part, 8, block, num_warps=4)
    return out.sum(0) if parts > 1 else out[0]
