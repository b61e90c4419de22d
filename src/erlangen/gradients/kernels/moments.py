"""Three numbers of every owner's gradient of every filter, in one pass over memory.

    energy = ‖g‖²,   total = Σ g,   along = ⟨w, g⟩

With them the norm of a gradient behind weight standardisation is known without forming it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, ROWS, power_of_two, whole


def reference(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, O] each, from g [n, O, L] and filters w [O, L]."""
    g = g.float()
    return g.square().sum(2), g.sum(2), (g * w).sum(2)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _moments(
        g, w, energy, total, along, L, FILTERS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """One program: TILE filters of one owner."""
        f = tl.program_id(0) * TILE + tl.arange(0, TILE)
        owner = tl.program_id(1).to(tl.int64)
        base = g + (owner * FILTERS + f[:, None]) * L
        square = tl.zeros([TILE, BLOCK], tl.float32)
        plain = tl.zeros([TILE, BLOCK], tl.float32)
        product = tl.zeros([TILE, BLOCK], tl.float32)
        for start in range(0, L, BLOCK):
            j = start + tl.arange(0, BLOCK)
            inside = (f < FILTERS)[:, None] & (j < L)[None, :]
            v = tl.load(base + j[None, :], mask=inside, other=0.0).to(tl.float32)
            square += v * v
            plain += v
            product += v * tl.load(w + f[:, None] * L + j[None, :], mask=inside, other=0.0)
        at = owner * FILTERS + f
        tl.store(energy + at, tl.sum(square, 1), mask=f < FILTERS)
        tl.store(total + at, tl.sum(plain, 1), mask=f < FILTERS)
        tl.store(along + at, tl.sum(product, 1), mask=f < FILTERS)


def moments(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`, for contiguous g and w."""
    if len(g) > ROWS:
        return whole(moments(part, w) for part in g.split(ROWS))
    owners, filters, length = g.shape
    energy, total, along = (torch.empty(owners, filters, device=g.device) for _ in range(3))
    block, tile = min(512, max(16, power_of_two(length))), 8
    _moments[(-(-filters // tile), owners)](
        g, w.float().contiguous(), energy, total, along, length, filters, tile, block, num_warps=8
    )
    return energy, total, along
