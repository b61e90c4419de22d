"""Sums over the pixels of a map, and lines through maps: all that a norm by statistics of each row and channel needs.

    Σ_p u,  Σ_p u·v   and   a·u + b·v + c,   with a, b, c: [n, C]
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, ROWS, power_of_two, whole

#: entries of a tile
TILE = 4096


def reference_sums(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[n, C] each, from maps [n, C, H, W]."""
    u, v = u.float(), v.float()
    return u.sum((2, 3)), (u * v).sum((2, 3))


def reference_line(u: Tensor, a: Tensor, c: Tensor, v: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    spread = lambda t: t[:, :, None, None]  # noqa: E731
    total = u.float() * spread(a) + spread(c)
    return (total if v is None or b is None else total + v.float() * spread(b)).to(u.dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _sums(u, v, first, second, AREA, C: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr):
        """One program: one row, BLOCK channels, every pixel."""
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.program_id(1).to(tl.int64)
        plain = tl.zeros([PIXELS, BLOCK], tl.float32)
        product = tl.zeros([PIXELS, BLOCK], tl.float32)
        for start in range(0, AREA, PIXELS):
            p = start + tl.arange(0, PIXELS)
            live = (p < AREA)[:, None] & (c < C)[None, :]
            at = (n * AREA + p)[:, None] * C + c[None, :]
            x = tl.load(u + at, mask=live, other=0.0).to(tl.float32)
            plain += x
            product += x * tl.load(v + at, mask=live, other=0.0).to(tl.float32)
        tl.store(first + n * C + c, tl.sum(plain, 0), mask=c < C)
        tl.store(second + n * C + c, tl.sum(product, 0), mask=c < C)

    @triton.jit
    def _line(
        u, v, out, a, b, shift, AREA, C: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr, TWO: tl.constexpr
    ):  # fmt: skip
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.program_id(1).to(tl.int64)
        slope = tl.load(a + n * C + c, mask=c < C, other=0.0)[None, :]
        offset = tl.load(shift + n * C + c, mask=c < C, other=0.0)[None, :]
        if TWO:
            other = tl.load(b + n * C + c, mask=c < C, other=0.0)[None, :]
        for start in range(0, AREA, PIXELS):
            p = start + tl.arange(0, PIXELS)
            live = (p < AREA)[:, None] & (c < C)[None, :]
            at = (n * AREA + p)[:, None] * C + c[None, :]
            total = tl.load(u + at, mask=live, other=0.0).to(tl.float32) * slope + offset
            if TWO:
                total += tl.load(v + at, mask=live, other=0.0).to(tl.float32) * other
            tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


def _launch(u: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs, and the constants of a launch."""
    rows, channels, area = u.shape[0], u.shape[1], u.shape[2] * u.shape[3]
    block = min(128, max(16, power_of_two(channels)))
    constants = {"AREA": area, "C": channels, "BLOCK": block, "PIXELS": min(TILE // block, max(16, power_of_two(area)))}
    return (-(-channels // block), rows), constants


def sums(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_sums`, of channels-last maps."""
    if len(u) > ROWS:
        return whole(sums(*parts) for parts in zip(u.split(ROWS), v.split(ROWS), strict=True))
    programs, constants = _launch(u)
    first, second = (torch.empty(*u.shape[:2], device=u.device, dtype=torch.float32) for _ in range(2))
    _sums[programs](u, v, first, second, **constants, num_warps=4)
    return first, second


def line(u: Tensor, a: Tensor, c: Tensor, v: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """As `reference_line`, of channels-last maps and contiguous a, b, c."""
    given = [t for t in (u, a, c, v, b) if t is not None]
    if len(u) > ROWS:
        return torch.cat([line(*parts) for parts in zip(*(t.split(ROWS) for t in given), strict=True)])
    out = torch.empty_like(u, memory_format=torch.channels_last)
    programs, constants = _launch(u)
    _line[programs](u, u if v is None else v, out, a, a if b is None else b, c, **constants, TWO=v is not None, num_warps=4)
    return out
