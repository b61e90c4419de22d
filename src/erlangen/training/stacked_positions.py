"""Kernel gradients of wide convolutions on few positions, kept as windows and cotangents; no row's gradient is formed.

On a 2×2 map 512 → 512 channels have 2.4 million weights and four positions: a row's gradient is Σ_t d_t ⊗ a_t with four
terms. Its norm comes from Gram matrices, the weighted sum over rows is one product. A block-circulant kernel sums the
gradient over wrapped diagonals, g[p, q, s] = Σ_{t,r} d[t, p, r]·a[t, q, (r + s) mod b]: the same form with b times the
positions. A filter on kernel axes is a matrix on the windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.circulant import blocks_for
from erlangen.gradients.pieces import exact_float32, gram_norms
from erlangen.training.stacked_rows import Formed, Rows

#: relative rounding of a float32 factor of ten bits (TF32), cut or rounded
TEN_BITS = 2.0**-10
#: floats that are written down at a time
LARGEST = 1 << 28


@dataclass(frozen=True)
class Blocks:
    """A kernel [O, C, taps] whose channel matrix has circulant blocks of b; the parameter is [O/b, C/b, b, taps]. Plain: b = 1."""

    size: int = 1

    def moved(self, a: Tensor) -> Tensor:
        """Windows [P, T, taps, C] → [P, T·b, C/b, b·taps]: what the cotangents of place r in a block meet, for every shift."""
        b = self.size
        cells = F.pad(a, (0, -a.shape[3] % b)).unflatten(3, (-1, b))  # [P, T, taps, q, c]
        met = cells[..., _shifts(b, a.device)]  # [P, T, taps, q, r, s]
        return met.permute(0, 1, 4, 3, 5, 2).reshape(a.shape[0], a.shape[1] * b, cells.shape[3], -1)

    def placed(self, d: Tensor) -> Tensor:
        """Cotangents [P, T, O] → [P, T·b, O/b]"""
        b = self.size
        return F.pad(d, (0, -d.shape[2] % b)).unflatten(2, (-1, b)).transpose(2, 3).flatten(1, 2)

    def folded(self, kernel: Tensor) -> Tensor:
        """Sums [..., O, taps, C] of a dense gradient → those of the parameter, [..., O/b·C/b·b·taps]."""
        b, (outputs, _, inputs) = self.size, kernel.shape[-3:]
        p, q = blocks_for(outputs, b), blocks_for(inputs, b)
        whole = F.pad(kernel, (0, q * b - inputs, 0, 0, 0, p * b - outputs))
        cells = whole.unflatten(-3, (p, b)).unflatten(-1, (q, b))  # [..., p, r, taps, q, c]
        cells = cells.movedim((-4, -1), (-2, -1))  # [..., p, taps, q, r, c]
        met = cells.gather(-1, _shifts(b, kernel.device).expand(cells.shape)).sum(-2)  # [..., p, taps, q, s]
        return met.movedim(-3, -1).flatten(-4)


def _shifts(block: int, device: torch.device) -> Tensor:
    """(r + s) mod b, [r, s]"""
    k = torch.arange(block, device=device)
    return (k[:, None] + k[None, :]) % block


class Positions(Rows):
    """Rows Σ_t d_t ⊗ a_t of windows a [N, T, taps, C] and cotangents d [N, T, O].

    Where 16-bit windows allow the fast product, the weighted cotangents are rounded to ten bits. That moves a row's term
    by at most 2⁻¹⁰·w·Σ_t ‖d_t‖‖a_t‖, and so much is added to the norm that clipping sees.
    """

    def __init__(self, models: int, a: Tensor, d: Tensor, blocks: Blocks) -> None:
        self.models, self.blocks = models, blocks
        self.a, self.d = a.unflatten(0, (models, -1)), d.unflatten(0, (models, -1))
        self.fast = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
        self._formed: Formed | None = None

    def energy(self, metric: Tensor | None = None) -> Tensor:
        if metric is not None or self._formed is not None:
            return self.form().energy(metric)
        return self._measured(None)

    def energy_in(self, matrices: Tensor) -> Tensor:
        """‖g·M‖² with a matrix [b·taps, b·taps] for every model on the last axes of the parameter, [E, P]."""
        return self._measured(matrices)

    def _measured(self, matrices: Tensor | None) -> Tensor:
        """Some models at a time: the windows of all shifts take b times the memory."""
        models, rows = self.a.shape[:2]
        together = max(1, LARGEST // (self.blocks.size * self.a[0].numel()))
        found = []
        for k in range(0, models, together):
            a, d = (_wide(t[k : k + together]).flatten(0, 1) for t in (self.a, self.d))
            with exact_float32():
                met = self._met(a, None if matrices is None else matrices[k : k + together])
                d = self.blocks.placed(d)
                squared = self._with_rounding(gram_norms(met, d).double(), met, d)
            found.append(squared.unflatten(0, (-1, rows)))
        return torch.cat(found)

    def _met(self, a: Tensor, matrices: Tensor | None) -> Tensor:
        """What the placed cotangents meet, times the matrix of the model: [N, T·b, everything else]."""
        if self.blocks.size == 1 and matrices is None:
            return a.flatten(2)
        met = self.blocks.moved(a)
        if matrices is not None:
            met = (met.reshape(len(matrices), -1, met.shape[3]) @ matrices.to(met.dtype)).view(met.shape)
        return met.flatten(2)

    def _with_rounding(self, squared: Tensor, met: Tensor, d: Tensor) -> Tensor:
        if not self.fast:
            return squared
        terms = (torch.linalg.vector_norm(met, dim=2) * torch.linalg.vector_norm(d, dim=2)).sum(1).double()
        return (squared.sqrt() + TEN_BITS * terms).square()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._formed is not None:
            return self._formed.weighted_sum(weights)
        keep = (weights != 0)[..., None, None]
        d = torch.where(keep, weights[..., None, None] * _wide(self.d), 0.0).flatten(1, 2)  # [E, P·T, O]
        a = torch.where(keep[..., None], self.a, 0.0).to(d.dtype).flatten(1, 2)  # [E, P·T, taps, C]
        with _ten_bits() if self.fast else exact_float32():
            total = d.mT @ a.flatten(2)
        return self.blocks.folded(total.unflatten(2, a.shape[2:]))

    def form(self) -> Formed:
        if self._formed is None:
            with exact_float32():
                whole = torch.einsum("epto,eptkc->epokc", _wide(self.d), _wide(self.a))
            self._formed = Formed(self.models, self.blocks.folded(whole).flatten(0, 1))
        return self._formed

    def dense(self) -> Tensor:
        return self.form().dense()


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


@contextmanager
def _ten_bits() -> Iterator[None]:
    """Products of float32 may round their factors to ten bits."""
    matmul: Any = torch.backends.cuda.matmul
    knob, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, knob)
    setattr(matmul, knob, value)
    try:
        yield
    finally:
        setattr(matmul, knob, before)


__all__ = ["Blocks", "Positions"]
