"""From gradients of dense kernels to gradients of the coefficients they are tied to, for every owner in one pass.

A row of coefficients (everything that reaches one output field) appears in ``copies`` rows of the dense kernel, each
time in another order. Its gradient is the sum of the copies, put in one order; and behind weight standardisation,

    v ↦ s·(w − a⟨a, w⟩),   w = v − b⟨u, v⟩,

the transposed Jacobian of the standardised row, with vectors u, b and a scale s of each output field and a unit vector a
(see `KernelExpansion.standardise_vjp`). The results stay in the order of the kernel's memory, which sums and norms do not
mind; whoever needs coefficients in their own order permutes the *sum* over owners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, ROWS, power_of_two, whole


@dataclass(frozen=True)
class Standardisation:
    """The transposed Jacobian of one layer's standardisation: u, b [fields, L], s [fields], a [L] (zero if no mean)."""

    u: Tensor
    b: Tensor
    s: Tensor
    a: Tensor


def reference(
    kernels: Tensor, source: Tensor, scale: Tensor | None, jacobian: Standardisation | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([n, fields, L] in ``dtype``, ‖·‖² [n] of what that holds). kernels: [n, fields, copies, entries]; ``source`` [copies, L]
    names the entries."""
    index = source.expand(*kernels.shape[:2], *source.shape).long()
    v = kernels.float().gather(-1, index).sum(2)
    if scale is not None:
        v = v * scale
    if jacobian is not None:
        w = v - jacobian.b * (v * jacobian.u).sum(-1, keepdim=True)
        v = jacobian.s[:, None] * (w - jacobian.a * (w * jacobian.a).sum(-1, keepdim=True))
    v = v.to(dtype)
    return v, v.float().square().sum((1, 2))


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _tied_sum(
        kernels, source, scale, u, b, s, a, out, norms, entries, FIELDS: tl.constexpr, COPIES: tl.constexpr,
        L: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, JACOBIAN: tl.constexpr,
    ):  # fmt: skip
        field = tl.program_id(0)
        owner = tl.program_id(1).to(tl.int64)
        j = tl.arange(0, BLOCK)
        inside = j < L
        base = kernels + (owner * FIELDS + field) * (COPIES * entries)
        v = tl.zeros([BLOCK], tl.float32)
        for copy in tl.static_range(COPIES):
            at = tl.load(source + copy * L + j, mask=inside, other=0)
            v += tl.load(base + copy * entries + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            v *= tl.load(scale + j, mask=inside, other=0.0)
        if JACOBIAN:
            along = tl.sum(v * tl.load(u + field * L + j, mask=inside, other=0.0), 0)
            v -= along * tl.load(b + field * L + j, mask=inside, other=0.0)
            mean = tl.load(a + j, mask=inside, other=0.0)
            v = tl.load(s + field) * (v - mean * tl.sum(v * mean, 0))
        stored = v.to(out.dtype.element_ty)
        tl.store(out + (owner * FIELDS + field) * L + j, stored, mask=inside)
        v = stored.to(tl.float32)
        tl.store(norms + owner * FIELDS + field, tl.sum(v * v, 0))


def tied_sum(
    kernels: Tensor, source: Tensor, scale: Tensor | None, jacobian: Standardisation | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference`. kernels must be contiguous; ``source`` is int32."""
    if len(kernels) > ROWS:
        return whole(tied_sum(part, source, scale, jacobian, dtype) for part in kernels.split(ROWS))
    owners, fields, copies, entries = kernels.shape
    length = source.shape[1]
    out = torch.empty(owners, fields, length, device=kernels.device, dtype=dtype)
    norms = torch.empty(owners, fields, device=kernels.device, dtype=torch.float32)
    nothing = norms
    j = jacobian
    _tied_sum[(fields, owners)](
        kernels, source, nothing if scale is None else scale, *((nothing,) * 4 if j is None else (j.u, j.b, j.s, j.a)),
        out, norms, entries, fields, copies, length, power_of_two(length), scale is not None, j is not None, num_warps=4,
    )  # fmt: skip
    return out, norms.sum(1)
