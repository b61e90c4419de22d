"""Kernel gradients behind a filter that keeps some frequencies of every kernel.

A filter is K orthonormal columns B [taps, K], the same for every pair of channels. What it leaves of a gradient are the
coordinates g B; they are all that is formed, measured and added up, and B g Bᵀ is what a mechanism is handed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from erlangen.gradients.pieces import Dense, Piece, Weight


@dataclass(frozen=True, eq=False)
class KernelFilter:
    """A weight for kernels [O, C, *k] whose norm is that of g B. Pieces that know it filter before they form anything
    (`Piece.filtered`). To others it is a function of formed gradients, ``guarded``, whose norm bounds that of g B.
    """

    #: which frequencies of a kernel are kept, in the order of an FFT, [*k]
    mask: Tensor
    #: B, in the precision and on the device of a tensor
    basis: Callable[[Tensor], Tensor]
    guarded: Callable[[Tensor], Tensor]

    def __call__(self, g: Tensor) -> Tensor:
        return self.guarded(g)

    def back(self, coordinates: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[..., O, C, K] → [..., *shape]"""
        lead = coordinates.shape[:-3]
        return (coordinates @ self.basis(coordinates).T).reshape(*lead, *shape)

    def outward(self, squared: Tensor, taps: int) -> Tensor:
        """Squared norms of coordinates that go back through Bᵀ, and through B once more where noise is added."""
        return squared * (1 + 4 * taps * torch.finfo(squared.dtype).eps)


class Projected(Piece):
    """Coordinates [n, O, C, K] that exist as a tensor."""

    def __init__(self, coordinates: Dense, by: KernelFilter, shape: tuple[int, ...]):
        self.coordinates, self.by, self.shape = coordinates, by, shape

    @property
    def filter(self) -> KernelFilter:  # type: ignore[override]
        return self.by

    @property
    def count(self) -> int:
        return self.coordinates.count

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return self.coordinates.guarded

    def dense(self) -> Tensor:
        return self.by.back(self.coordinates.dense(), self.shape)

    def formed(self) -> Piece:
        return self

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not self.by:
            return Dense(self.dense()).norms_squared(weight)
        return self.by.outward(self.coordinates.norms_squared(), math.prod(self.shape[2:]))

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.by.back(self.coordinates.weighted_sum(w), self.shape)

    def zero(self, bad: Tensor) -> Piece:
        return Projected(Dense(self.coordinates.zero(bad).dense()), self.by, self.shape)

    def without(self, bad: Tensor) -> Piece:
        return self.zero(bad)
