"""Small gradients side by side: the biases and scales of a network in a few launches, not a few for each of them.

A network of twenty layers has twice as many small parameters. Each costs a GPU next to nothing, and the host a dozen calls
for its norm and its sum; on a fast GPU the host is then what a step waits for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from erlangen.gradients.pieces import Dense, Piece, accumulate_dtype, row_sum, skips_zero_weights

#: entries of a gradient up to which it is copied beside the others
SMALL = 4096


class Bundle:
    """The small, formed gradients of several parameters as one matrix [n, D], float32 at least: nothing is rounded."""

    def __init__(self, pieces: Mapping[str, Dense]) -> None:
        parts = {name: piece.g.reshape(piece.count, -1) for name, piece in pieces.items()}
        self.shapes = {name: piece.g.shape[1:] for name, piece in pieces.items()}
        self.widths = tuple(part.shape[1] for part in parts.values())
        matrix = torch.cat(list(parts.values()), 1)
        self.matrix = matrix.to(accumulate_dtype(matrix))

    @classmethod
    def of(cls, pieces: Mapping[str, Piece]) -> Bundle | None:
        """Of those that are small, formed, and where the kernel sums that reads no owner of weight zero."""
        small = {name: piece for name, piece in pieces.items() if isinstance(piece, Dense) and _is_small(piece)}
        alike = len({(piece.count, piece.g.device) for piece in small.values()}) == 1
        return cls(small) if len(small) > 1 and alike else None

    def norms_squared(self) -> dict[str, Tensor]:
        """‖g_i‖² by parameter. A row that is not finite has no finite norm in any of them: it counts in none anyway."""
        found = _segments(self.widths, self.matrix.device, self.matrix.dtype) @ self.matrix.square().t()
        return dict(zip(self.shapes, found.unbind(0), strict=True))

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        parts = row_sum(w, self.matrix).split(self.widths)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def _is_small(piece: Dense) -> bool:
    return (
        piece.norms is None
        and piece.count > 0
        and 0 < math.prod(piece.g.shape[1:]) <= SMALL
        and skips_zero_weights(piece.g)
    )


@functools.lru_cache(maxsize=16)
def _segments(widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[parameters, D]: 1 where an entry belongs to a parameter."""
    index = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    return (torch.arange(len(widths))[:, None] == index).to(device, dtype)
