"""Kernel gradients of wide convolutions on few positions, kept as windows and cotangents; no row's gradient is formed.

On a 2×2 map 512 → 512 channels have 2.4 million weights and four positions: a row's gradient is Σ_t d_t ⊗ a_t with four
terms. Its norm comes from Gram matrices, the weighted sum over rows is one product. A block-circulant kernel sums the
gradient over wrapped diagonals, g[p, q, s] = Σ_{t,r} d[t, p, r]·a[t, q, (r + s) mod b], and

    ‖g‖² = Σ_δ Σ_{t,u} (Σ_r ⟨d[t, r], d[u, r + δ]⟩)·(Σ_c ⟨a[t, c], a[u, c + δ]⟩),

whose only term is the usual one where b = 1. A filter on the last axes of the parameter acts on the windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.circulant.algebra import blocks_for, shifts
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.rounding import additions, gram, hidden, outward
from erlangen.training.stacked_rows import Filter, Formed, Rows

#: relative rounding of a float32 factor of ten bits (TF32), cut or rounded
TEN_BITS = 2.0**-10
#: floats that are written down at a time
LARGEST = 1 << 28


@dataclass(frozen=True)
class Blocks:
    """A kernel [O, C, taps] whose channel matrix has circulant blocks of b; the parameter is [O/b, C/b, b, taps]. Plain: b = 1."""

    size: int = 1

    def split(self, t: Tensor) -> Tensor:
        """Channels in blocks: [..., C] → [..., C/b, b]"""
        return _padded(t, (0, -t.shape[-1] % self.size)).unflatten(-1, (-1, self.size))

    def grams(self, places: Tensor) -> Tensor:
        """Of vectors v by place in a block, [N, b, T, n]: Σ_c ⟨v[c, t], v[(c + δ) mod b, s]⟩, [N, T, T, δ]."""
        b, count = self.size, places.shape[2]
        pairs = gram(places.flatten(1, 2)).view(-1, b, count, b, count).permute(0, 2, 4, 1, 3)  # [N, t, s, c, c']
        return pairs.gather(4, shifts(b, places.device).expand(pairs.shape)).sum(3)

    def folded(self, kernel: Tensor) -> Tensor:
        """Sums [..., O, taps, C] of a dense gradient → those of the parameter, [..., O/b·C/b·b·taps]."""
        b, (outputs, _, inputs) = self.size, kernel.shape[-3:]
        p, q = blocks_for(outputs, b), blocks_for(inputs, b)
        whole = _padded(kernel, (0, q * b - inputs, 0, 0, 0, p * b - outputs))
        cells = whole.unflatten(-3, (p, b)).unflatten(-1, (q, b))  # [..., p, r, taps, q, c]
        cells = cells.movedim((-4, -1), (-2, -1))  # [..., p, taps, q, r, c]
        met = cells.gather(-1, shifts(b, kernel.device).expand(cells.shape)).sum(-2)  # [..., p, taps, q, s]
        return met.movedim(-3, -1).flatten(-4)


class Positions(Rows):
    """Rows Σ_t d_t ⊗ a_t of windows a [N, T, taps, C] and cotangents d [N, T, O].

    With M = √b·Σ_t ‖d_t‖‖a_t‖, what clipping sees is at least the norm of what one row adds to the sum:

    - Gram matrices, their products and the sum itself err by as many roundings as they have additions (`outward`);
    - where 16-bit windows allow the fast product, they are exact in ten bits and the weighted cotangents are not. Rounded to
      the nearest they move by 2⁻¹¹ at most; cut, they are (1 − 2⁻¹¹)d moved by that much. So much of w·M is added, and as
      much again for what the matrix units lose of their sums;
    - a filter R moves windows by at most K·ε/2·‖|R|‖·‖a_t‖ as it adds K products, M by as much.
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

    def filtered_energy(self, by: Filter, metric: Tensor | None = None) -> Tensor:
        """A filter commutes with shifts within a block: to filter the windows is to filter the gradient."""
        if metric is not None or self._formed is not None or not self._within_windows(by.size):
            return self.form().filtered_energy(by, metric)
        return self._measured(by.matrix)

    def _within_windows(self, size: int) -> bool:
        """Whether the last ``size`` entries of the parameter belong to one window: none over output channels."""
        b, (taps, channels) = self.blocks.size, self.a.shape[3:]
        return blocks_for(channels, b) * b * taps % size == 0

    def _measured(self, filters: Tensor | None) -> Tensor:
        """‖g‖² = Σ_δ Σ_{t,s} D_δ[t, s]·A_δ[t, s], from the Gram matrices of cotangents and windows at every shift δ."""
        models, rows = self.a.shape[:2]
        together = max(1, LARGEST // self.a[0].numel())
        found = []
        for k in range(0, models, together):  # some models at a time, for memory
            a, d = (_wide(t[k : k + together]).flatten(0, 1) for t in (self.a, self.d))
            mine = None if filters is None else filters[k : k + together].to(a.dtype)
            with exact_float32():
                places = self._windows(a, mine), self._cotangents(d)
                squared = self._squared(*places)
            if mine is not None:
                squared = (squared.sqrt() + self._moved(a, d, mine)).square()
            found.append(squared.unflatten(0, (-1, rows)))
        return torch.cat(found)

    def _moved(self, a: Tensor, d: Tensor, filters: Tensor) -> Tensor:
        """What rounding in the filter moves the norm by, at most."""
        size = filters.abs()
        stretch = (size.sum(1).amax(1) * size.sum(2).amax(1)).sqrt().double()  # ‖|R|‖₂² ≤ ‖R‖₁‖R‖_∞
        length = lambda t: torch.linalg.vector_norm(t.flatten(2), dim=2, dtype=torch.float64)  # noqa: E731
        terms = (length(a) * length(d)).sum(1)
        unit = 0.55 * torch.finfo(a.dtype).eps * (filters.shape[1] + 2) * math.sqrt(self.blocks.size)
        return unit * stretch.repeat_interleave(len(a) // len(filters)) * terms

    def _cotangents(self, d: Tensor) -> Tensor:
        """[N, T, O] → [N, b, T, O/b]"""
        return self.blocks.split(d).permute(0, 3, 1, 2)

    def _windows(self, a: Tensor, filters: Tensor | None) -> Tensor:
        """[N, T, taps, C] → [N, b, T, taps·C/b], filtered."""
        cells = self.blocks.split(a)  # [N, T, taps, q, c]
        if filters is None:
            return cells.permute(0, 4, 1, 2, 3).flatten(3)
        last = cells.permute(0, 1, 3, 4, 2)  # [N, T, q, c, taps]
        turned = last.reshape(len(filters), -1, filters.shape[1]) @ filters
        return turned.view(last.shape).permute(0, 3, 1, 2, 4).flatten(3)

    def _squared(self, a: Tensor, d: Tensor) -> Tensor:
        """From [N, b, T, n] each, rounded outwards: a term d_t of b places meets b shifts of a_t."""
        (b, count, inputs), outputs = a.shape[1:], d.shape[3]
        gram_a, gram_d = self.blocks.grams(a), self.blocks.grams(d)
        own_a, own_d = (g[..., 0].diagonal(dim1=1, dim2=2).clamp(min=0) for g in (gram_a, gram_d))
        terms = (own_a.sqrt() * own_d.sqrt()).sum(1)
        units = additions(inputs) + additions(outputs) + 3 * b + 2 * count
        value = outward((gram_a * gram_d).sum(3).sum(2).sum(1), b * terms.square(), units, count + b)
        value = value + b * hidden(own_a, own_d, b * (inputs + outputs))
        if not self.fast:
            return value.double()
        return (value.double().sqrt() + TEN_BITS * math.sqrt(b) * terms.double()).square()

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


def _padded(t: Tensor, pads: tuple[int, ...]) -> Tensor:
    return F.pad(t, pads) if any(pads) else t


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
