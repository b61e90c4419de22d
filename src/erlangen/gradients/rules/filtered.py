"""Convolutions behind a filter: windows are filtered, not gradients.

    g_i B = Σ_t d_t ⊗ (a_t B),    a_t [C, taps] the window at position t of owner i

A window has C·taps entries at each of T positions, a gradient O·C·taps: where T < O there is less to filter, and nothing that
the filter throws away is ever computed. Norms, sums and gradients are those of a linear layer with C·K inputs, K of taps.

What is added up is filtered before it is added, so that nothing outside the kept frequencies can hide in the sum. The
rounding of a filtered window is that of the whole window; norms from Gram matrices are rounded outwards by it.

Where a GPU's kernels take 16-bit products no window is formed. There the maps are filtered, once, into K channels for each
of theirs, and what is left is a 1×1 convolution: norms and sums read the very same filtered numbers. On large maps, of more
numbers than gradients have, gradients are formed and filtered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from erlangen.gradients.filtered import KernelFilter, Projected
from erlangen.gradients.kernels.filtered_maps import POINT, filtered_maps
from erlangen.gradients.pieces import Dense, Piece, Weight, gram_is_cheaper, gram_norms, rescaled, unit_scale
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.rounding import weighed
from erlangen.gradients.rules.conv import PLAIN, WINDOW_FLOATS, Conv, Geometry
from erlangen.gradients.sums import squared_norms
from erlangen.gradients.tracing import as_on_gpu

#: output channels up to which a gradient is formed whole and filtered then
FEW_OUTPUTS = 32
#: a sum over owners reads windows of so many times as many as fit into the cache: its product wants to be long
LONG = 4


class FilteredConv(Piece):
    """Per-owner kernel gradients of a convolution without groups, behind a filter."""

    def __init__(self, conv: Conv, by: KernelFilter):
        self.conv, self.by, self.shape = conv, by, conv.shape
        self.whole = conv
        self.taps, self.channels = math.prod(self.shape[2:]), self.shape[1]
        self.kept = by.basis(conv.d).shape[1]

    @property
    def filter(self) -> KernelFilter:  # type: ignore[override]
        return self.by

    @property
    def count(self) -> int:
        return self.conv.count

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return not gram_is_cheaper(self.conv.tokens, self.channels * self.kept, self.shape[0], self.conv.d)

    def dense(self) -> Tensor:
        return self.by.back(self.coordinates(), self.shape)

    def formed(self) -> Piece:
        return Projected(Dense(self.coordinates()), self.by, self.shape)

    @torch.no_grad()
    def coordinates(self) -> Tensor:
        """[n, O, C, K]"""
        conv = self.conv
        if conv.has_kernel():
            return (self.by.basis(conv.d).T @ conv.by_tap()).mT
        if self.shape[0] <= FEW_OUTPUTS:
            return conv.dense().flatten(3) @ self.by.basis(conv.d)
        d, (size, windows) = conv.cotangents().squeeze(1), self._windows(conv)
        out = d.new_empty(self.count, self.shape[0], self.channels * self.kept)
        for start in range(0, self.count, size):
            stop = min(self.count, start + size)
            torch.bmm(d[start:stop], windows(start, stop).mT, out=out[start:stop])
        return out.unflatten(2, (self.channels, self.kept))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not self.by:
            return super().norms_squared(weight)
        if not self.prefers_dense:
            return self.by.outward(self._gram(), self.taps)
        self.measured_formed = True
        return self.by.outward(torch.cat([squared_norms(p.precise().coordinates()) for p in self.chunks()]), self.taps)

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        piece = self.precise()
        conv = piece.conv
        d, x = weighed(conv.d, conv.x, w.to(conv.d.dtype), conv.views)
        total = d.new_zeros(self.shape[0], self.channels * self.kept)
        rows = self._rows()
        for d_part, x_part in zip(d.split(rows), x.split(rows), strict=True):
            together = Conv(x_part, d_part, len(d_part), self.shape, conv.geometry)  # one owner: all that are in the part
            _, windows = piece._windows(together)
            total.addmm_(together.cotangents()[0, 0], windows(0, 1)[0].mT)
        return self.by.back(total.unflatten(1, (self.channels, self.kept)), self.shape)

    def sum_of_formed(self, w: Tensor) -> Tensor:
        parts = self.chunks()
        shares = w.split([part.count for part in parts])
        sums = [Dense(p.precise().coordinates()).weighted_sum(share) for p, share in zip(parts, shares, strict=True)]
        return self.by.back(torch.stack(sums).sum(0), self.shape)

    def precise(self) -> FilteredConv:
        high = accumulate_dtype(self.conv.d)
        return self if self.conv.d.dtype == high else FilteredConv(self.conv.precise(), self.by)

    def chunks(self) -> list[FilteredConv]:  # type: ignore[override]
        return [FilteredConv(part, self.by) for part in self.conv.chunks()]

    def zero(self, bad: Tensor) -> Piece:
        return FilteredConv(self.conv.zero(bad), self.by)

    def _gram(self) -> Tensor:
        conv = self.conv
        (x, size_x), (d, size_d) = unit_scale(conv.x, conv.count), unit_scale(conv.d, conv.count)
        scaled = Conv(x, d, conv.views, self.shape, conv.geometry)
        d, (size, windows), whole = scaled.cotangents().squeeze(1).mT, self._windows(scaled), _energies(scaled)
        roundings = (self.taps + 2) * math.sqrt(self.kept)
        norms = [
            gram_norms(windows(start, stop).mT, d[start:stop], whole[start:stop], roundings)
            for start, stop in ((k, min(conv.count, k + size)) for k in range(0, conv.count, size))
        ]
        return rescaled(torch.cat(norms), size_x, size_d)

    def _windows(self, conv: Conv) -> tuple[int, Callable[[int, int], Tensor]]:
        """How many owners at a time, and of owners ``start`` to ``stop`` the filtered windows [m, C·K, V·T]."""
        size = conv.part(conv.tokens * self.channels * (self.taps + self.kept))
        raw, basis = conv.windows_of(False, size), self.by.basis(conv.d)

        def windows(start: int, stop: int) -> Tensor:
            held = raw(start, stop).view(-1, self.taps, conv.tokens)
            return (basis.T @ held).view(stop - start, -1, conv.tokens)

        return size, windows

    def _rows(self) -> int:
        """Rows whose windows a sum reads at a time."""
        conv = self.conv
        entries = conv.tokens // conv.views * self.channels * (self.taps + self.kept)
        room = 1 << 27 if as_on_gpu(conv.d) else LONG * WINDOW_FLOATS * torch.get_num_threads()
        return max(1, room // max(1, entries))


class FilteredMaps(Piece):
    """Per-owner kernel gradients behind a filter, as those of a 1×1 convolution ``point`` of filtered maps [n·V, K·C, *S']."""

    def __init__(self, point: Conv, by: KernelFilter, shape: tuple[int, ...], whole: Piece | None = None):
        self.point, self.by, self.shape, self.whole = point, by, shape, whole

    @classmethod
    def of(cls, conv: Conv, by: KernelFilter) -> FilteredMaps:
        columns = by.basis(conv.d.new_empty(0, dtype=torch.float32))[None]
        g = conv.geometry
        y = filtered_maps(conv.x, columns, g.kernel, g.stride, g.padding, g.dilation)  # type: ignore[arg-type]
        shape = (conv.shape[0], y.shape[1], 1, 1)
        return cls(Conv(y, conv.d, conv.views, shape, Geometry(*POINT, 1)), by, conv.shape, conv)

    @staticmethod
    def are_fewer(conv: Conv, by: KernelFilter) -> bool:
        """Whether filtered maps have fewer numbers than gradients before the filter: both are written once and read."""
        return conv.tokens * by.basis(conv.d).shape[1] < math.prod(conv.shape[2:]) * conv.shape[0]

    @property
    def filter(self) -> KernelFilter:  # type: ignore[override]
        return self.by

    @property
    def count(self) -> int:
        return self.point.count

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return self.point.prefers_dense

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return self.point.guarded

    def dense(self) -> Tensor:
        return self.by.back(self._apart(self.point.dense()), self.shape)

    def formed(self) -> Piece:
        return Projected(Dense(self._apart(self.point.dense())), self.by, self.shape)

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not self.by:
            return super().norms_squared(weight)
        squared = self.point.norms_squared()
        self.measured_formed = self.point.measured_formed
        return self.by.outward(squared, math.prod(self.shape[2:]))

    def weighted_sum(self, w: Tensor) -> Tensor:
        self.point.measured_formed = self.measured_formed
        return self.by.back(self._apart(self.point.weighted_sum(w)), self.shape)

    def precise(self) -> FilteredMaps:
        return FilteredMaps(self.point.precise(), self.by, self.shape)

    def chunks(self) -> list[FilteredMaps]:  # type: ignore[override]
        return [FilteredMaps(part, self.by, self.shape) for part in self.point.chunks()]

    def zero(self, bad: Tensor) -> Piece:
        return FilteredMaps(self.point.zero(bad), self.by, self.shape)

    def _apart(self, g: Tensor) -> Tensor:
        """Gradients [..., O, K·C, 1, 1] as coordinates [..., O, C, K]."""
        return g.flatten(-3).unflatten(-1, (-1, self.shape[1])).mT


def _energies(conv: Conv) -> Tensor:
    """‖a_t‖² of whole windows, [n, V·T]"""
    g, axes = conv.geometry, len(conv.geometry.kernel)
    pixels = conv.x.square().sum(1, keepdim=True)
    sums = PLAIN[axes](pixels, pixels.new_ones(1, 1, *g.kernel), None, g.stride, g.padding, g.dilation)
    return sums.reshape(conv.count, conv.tokens).clamp(min=0)
