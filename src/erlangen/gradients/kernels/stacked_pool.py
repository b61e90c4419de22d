"""2×2 pooling of channels-last maps of even size, one pass each way: means, or maxima found again on the way back.

A ReLU before maxima is one after them, max(0, max x), and costs nothing here: no map is written for it, none read again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two


def reference(x: Tensor, largest: bool, relu: bool = False) -> Tensor:
    """``relu``: pooling of relu(x), for maxima."""
    return F.max_pool2d(F.relu(x) if relu else x, 2) if largest else F.avg_pool2d(x, 2)


def fits(x: Tensor) -> bool:
    return (
        x.ndim == 4 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0 and x.numel() > 0
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.is_contiguous(memory_format=torch.channels_last)
    )  # fmt: skip


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _takes_over(value, best):
        """A larger value wins, and a NaN does: as the native layer has it."""
        return (value > best) | (value != value)

    @triton.jit
    def _pool(
        x, z, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, MAX: tl.constexpr, RELU: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: BLOCK outputs of one map of SIZE outputs."""
        n = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = i < SIZE
        pixel = i // C
        at = x + n * (4 * SIZE) + ((pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2) * C + i % C
        a = tl.load(at, mask=here, other=0.0).to(tl.float32)
        b = tl.load(at + C, mask=here, other=0.0).to(tl.float32)
        c = tl.load(at + W * C, mask=here, other=0.0).to(tl.float32)
        d = tl.load(at + W * C + C, mask=here, other=0.0).to(tl.float32)
        if MAX:
            r = tl.where(_takes_over(b, a), b, a)
            r = tl.where(_takes_over(c, r), c, r)
            r = tl.where(_takes_over(d, r), d, r)
            if RELU:
                r = tl.where(r < 0, 0.0, r)  # a NaN stays one
        else:
            r = (a + b + c + d) * 0.25
        tl.store(z + n * SIZE + i, r.to(z.dtype.element_ty), mask=here)

    @triton.jit
    def _back(
        x, dz, dx, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, MAX: tl.constexpr, RELU: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = i < SIZE
        pixel = i // C
        place = ((pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2) * C + i % C
        to = dx + n * (4 * SIZE) + place
        g = tl.load(dz + n * SIZE + i, mask=here, other=0.0).to(tl.float32)
        if MAX:
            at = x + n * (4 * SIZE) + place
            a = tl.load(at, mask=here, other=0.0).to(tl.float32)
            b = tl.load(at + C, mask=here, other=0.0).to(tl.float32)
            c = tl.load(at + W * C, mask=here, other=0.0).to(tl.float32)
            d = tl.load(at + W * C + C, mask=here, other=0.0).to(tl.float32)
            second = _takes_over(b, a)
            best = tl.where(second, b, a)
            third = _takes_over(c, best)
            best = tl.where(third, c, best)
            fourth = _takes_over(d, best)
            if RELU:
                g = tl.where(tl.where(fourth, d, best) <= 0, 0.0, g)
            ga = tl.where(second | third | fourth, 0.0, g)
            gb = tl.where(third | fourth, 0.0, tl.where(second, g, 0.0))
            gc = tl.where(fourth, 0.0, tl.where(third, g, 0.0))
            gd = tl.where(fourth, g, 0.0)
        else:
            ga = g * 0.25
            gb = ga
            gc = ga
            gd = ga
        tl.store(to, ga.to(dx.dtype.element_ty), mask=here)
        tl.store(to + C, gb.to(dx.dtype.element_ty), mask=here)
        tl.store(to + W * C, gc.to(dx.dtype.element_ty), mask=here)
        tl.store(to + W * C + C, gd.to(dx.dtype.element_ty), mask=here)


def _grid(size: int, maps: int) -> tuple[tuple[int, int], int]:
    block = min(1024, power_of_two(size))
    return (maps, -(-size // block)), block


def forward(x: Tensor, largest: bool, relu: bool = False) -> Tensor:
    """As `reference`, for maps that it `fits`."""
    n, channels, height, width = x.shape
    z = torch.empty(
        n, channels, height // 2, width // 2, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    size = z[0].numel()
    grid, block = _grid(size, n)
    _pool[grid](x, z, width, channels, size, largest, relu, block, num_warps=4)
    return z


def backward(x: Tensor | None, cotangent: Tensor, largest: bool, relu: bool = False) -> Tensor:
    """The cotangent of x; for means x is not read."""
    n, channels, height, width = cotangent.shape
    cotangent = cotangent.contiguous(memory_format=torch.channels_last)
    dx = torch.empty(
        n, channels, 2 * height, 2 * width, device=cotangent.device, dtype=cotangent.dtype,
        memory_format=torch.channels_last,
    )  # fmt: skip
    size = cotangent[0].numel()
    grid, block = _grid(size, n)
    _back[grid](dx if x is None else x, cotangent, dx, 2 * width, channels, size, largest, relu, block, num_warps=4)
    return dx
