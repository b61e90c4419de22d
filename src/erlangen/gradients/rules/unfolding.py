"""im2col on a CPU: windows of a part of a batch, copied in long runs into buffers that stay in the cache.

A copy pays for every run of neighbouring entries as much as for some forty entries more, and the windows of a narrow kernel
or of few channels are many short runs. Unfolded along its last axis first, an image has them side by side: the second copy
takes whole windows at once (channels innermost) or whole maps (positions innermost).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from erlangen.gradients.rules.conv import Geometry

# Measured costs of copying, in entries of a run: to begin one; an entry that is not beside the one before it; an entry whose
# channel goes from outermost to innermost.
RUN, APART, TURNED = 36, 12, 8


@dataclass(frozen=True)
class Way:
    """Windows as [positions, taps, channels] (``last``) or [channels, taps, positions]; by one copy, or by two that go
    through unfolded ``rows``."""

    last: bool
    rows: bool


WAYS = tuple(Way(last, rows) for last, rows in itertools.product((True, False), repeat=2))


def cost(way: Way, shape: Sequence[int], turned: bool, out: Sequence[int], geometry: Geometry) -> float:
    """Of the windows of one image of this ``shape``, whose channels are not where they shall be if ``turned``; ``out`` are
    the positions along each axis."""
    (*taps, tap), (*across, along), channels = geometry.kernel, out, shape[0]
    if way.last:
        run, entry = tap * channels if geometry.dilation[-1] == 1 else channels, 1
        whole = tap * channels * (taps[-1] if taps and geometry.dilation[-2] == 1 else 1)
    else:
        run, entry = along, 1 if geometry.stride[-1] == 1 else APART
        whole = along * (across[-1] if across and geometry.stride[-2] == 1 else 1)
    turn, entries = TURNED * math.prod(shape) if turned else 0, channels * math.prod(geometry.kernel) * math.prod(out)
    if not way.rows:
        return turn + entries * (RUN / run + entry)
    heights = math.prod(s + 2 * p for s, p in zip(shape[1:-1], geometry.padding, strict=False))
    return turn + heights * channels * tap * along * (RUN / run + entry) + entries * (RUN / whole + 1)


def cheapest(x: Tensor, out: Sequence[int], geometry: Geometry, last: bool | None = None) -> Way:
    """Of all ways, or of those with the layout that ``last`` names. Windows of groups have positions innermost."""
    return _cheapest(tuple(x.shape[1:]), x.stride(1) == 1, tuple(out), geometry, last)


@functools.lru_cache(maxsize=256)
def _cheapest(
    shape: tuple[int, ...], innermost: bool, out: tuple[int, ...], geometry: Geometry, last: bool | None
) -> Way:
    allowed = [way for way in WAYS if last in (None, way.last) and not (way.last and geometry.groups > 1)]
    return min(allowed, key=lambda way: cost(way, shape, shape[0] > 1 and innermost != way.last, out, geometry))


class Unfolding:
    """Windows of at most ``owners`` owners at a time, always in the same buffers. x: [n·V, C, *S], V views per owner."""

    def __init__(self, x: Tensor, views: int, out: Sequence[int], geometry: Geometry, way: Way, owners: int):
        self.x, self.views, self.geometry = x, views, geometry
        (*_, tap), images, channels, axes = geometry.kernel, owners * views, x.shape[1], len(out)
        *tall, wide = (s + 2 * p for s, p in zip(x.shape[2:], geometry.padding, strict=True))
        inside = [slice(p, p + s) for s, p in zip(x.shape[2:], geometry.padding, strict=True)]
        self.inside = (slice(None), slice(None), *inside)
        blank = x.new_zeros if any(geometry.padding) else x.new_empty
        # Whatever lies innermost, their axes are [images, C, *tall, wide], [images, C, tap, *tall, along] and
        # [owners, V, C, *k, *out].
        if way.last:
            self.image = blank((images, *tall, wide, channels)).movedim(-1, 1)
            rows = x.new_empty(images, out[-1], *tall, tap, channels) if way.rows else None
            self.rows = None if rows is None else rows.movedim((-1, -2, 1), (1, 2, -1))
            self.stored = x.new_empty(owners, views, *out, *geometry.kernel, channels)
            self.windows = self.stored.permute(0, 1, -1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))
        else:
            self.image = blank((images, channels, *tall, wide))
            self.rows = x.new_empty(images, channels, tap, *tall, out[-1]) if way.rows else None
            self.stored = x.new_empty(owners, channels, *geometry.kernel, views, *out)
            self.windows = self.stored.movedim(2 + axes, 1)

    def __call__(self, start: int, stop: int) -> Tensor:
        """Of owners ``start`` to ``stop``: [m, V, *out, *k, C], or [m, C, *k, V, *out] with positions innermost."""
        image, g, views = self._padded(self.x[start * self.views : stop * self.views]), self.geometry, self.views
        row, channel, *axes, one = image.stride()
        tap, along = one * g.dilation[-1], one * g.stride[-1]
        if self.rows is not None:
            rows = self.rows[: len(image)]
            image = rows.copy_(image.as_strided(rows.shape, (row, channel, tap, *axes, along)))
            row, channel, tap, *axes, along = image.stride()
        taps = [s * e for s, e in zip(axes, g.dilation, strict=False)]
        across = [s * e for s, e in zip(axes, g.stride, strict=False)]
        windows = self.windows[: stop - start]
        windows.copy_(image.as_strided(windows.shape, (views * row, row, channel, *taps, tap, *across, along)))
        return self.stored[: stop - start]

    def _padded(self, x: Tensor) -> Tensor:
        """The images in the order of the buffer, and with its border of zeros; themselves where they are so already."""
        image = self.image[: len(x)]
        steps = zip(x.shape, x.stride(), image.stride(), strict=True)
        if x.shape == image.shape and all(size == 1 or a == b for size, a, b in steps):
            return x
        image[self.inside].copy_(x)
        return image


__all__ = ["Unfolding", "Way", "cheapest"]
