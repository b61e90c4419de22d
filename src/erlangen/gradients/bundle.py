"""Small gradients side by side: the biases and scales of a network in a few launches, not a few for each of them.

A network of twenty layers has twice as many small parameters. Each costs the device next to nothing, and the host a dozen
calls for its norm and its sum: on a fast GPU the host is then what a step waits for, and so it is on a CPU whose network
is small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from erlangen.gradients.pieces import Dense, Piece
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.sums import row_sum, skips_zero_weights

#: entries of a gradient up to which it is copied beside the others; on a CPU a copy soon costs more than the calls it saves
SMALL, SMALL_ON_CPU = 1024, 256


class Bundle:
    """The small, formed gradients of several parameters as one matrix [n, D], float32 at least: nothing is rounded."""

    def __init__(self, pieces: Mapping[str, Dense]) -> None:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, piece in pieces.items():  # tensors of one type are joined in one launch, others in one each
            by_dtype.setdefault(piece.g.dtype, []).append(name)
        order = [name for names in by_dtype.values() for name in names]
        parts = {name: pieces[name].g.reshape(pieces[name].count, -1) for name in order}
        self.shapes = {name: pieces[name].g.shape[1:] for name in order}
        self.widths = tuple(part.shape[1] for part in parts.values())
        alike = [torch.cat([parts[name] for name in names], 1) for names in by_dtype.values()]
        matrices = [matrix.to(accumulate_dtype(matrix)) for matrix in alike]
        self.matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)

    @classmethod
    def of(cls, pieces: Mapping[str, Piece]) -> Bundle | None:
        """Of those that are small and formed. Owners that are not finite are either never read by the sum (a GPU's kernel)
        or found before it and set to zero, which takes the bundle apart."""
        small = {name: piece for name, piece in pieces.items() if isinstance(piece, Dense) and _is_small(piece)}
        alike = len({(piece.count, piece.g.device, accumulate_dtype(piece.g)) for piece in small.values()}) == 1
        return cls(small) if len(small) > 1 and alike else None

    def norms_squared(self) -> dict[str, Tensor]:
        """‖g_i‖² by parameter, never below the exact value. A row that is not finite has no finite norm in any of them: it
        counts in none anyway."""
        found = _segments(self.widths, self.matrix.device, self.matrix.dtype) @ self.matrix.square().t()
        return dict(zip(self.shapes, found.unbind(0), strict=True))

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        parts = row_sum(w, self.matrix).split(self.widths)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def _is_small(piece: Dense) -> bool:
    if piece.norms is not None or not piece.count:
        return False
    on_cpu = piece.g.device.type == "cpu"
    limit = SMALL if skips_zero_weights(piece.g) else SMALL_ON_CPU if on_cpu else 0
    return 0 < math.prod(piece.g.shape[1:]) <= limit


@functools.lru_cache(maxsize=16)
def _segments(widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[parameters, D]: where an entry belongs to a parameter, 1 and what adding up as many squares may lose to rounding."""
    sizes = torch.tensor(widths, dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    outward = 1 + (sizes + 4) * torch.finfo(dtype).eps
    return ((torch.arange(len(widths))[:, None] == index) * outward[:, None]).to(device, dtype)
