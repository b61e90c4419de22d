"""Activation and group normalisation of the rows of many models, each with its own γ and β, in one launch each way.

    z = γ[e]·x̂ + β[e],   x̂ = (pre(y) − μ)/√(var + ε),   μ, var per row over the pixels and channels of a group

As `norm_act`, without what follows the norm, for maps of any size. Backwards: the cotangent of y, and Σ over pixels of
dz·x̂ and of dz for every row and channel, which are the gradients of γ and β. Only y and two numbers per group are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two
from erlangen.gradients.kernels.norm_act import _TUNED, ACTIVATIONS, TWINS, NormAct


def reference(y: Tensor, gamma: Tensor, beta: Tensor, spec: NormAct) -> Tensor:
    """y [E·P, C, H, W]; γ and β [E, C]."""
    rows = len(y) // len(gamma)
    x = F.group_norm(TWINS[spec.pre](y), spec.groups, eps=spec.eps)
    scale, shift = (p.repeat_interleave(rows, 0)[..., None, None] for p in (gamma, beta))
    return x * scale + shift


def fits(y: Tensor, spec: NormAct) -> bool:
    """Maps the kernels can work on as they lie in memory."""
    return (
        y.ndim == 4 and y.numel() > 0 and y.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and y.is_contiguous(memory_format=torch.channels_last) and power_of_two(y.shape[1] // spec.groups) <= 1024
    )  # fmt: skip


if HAS_TRITON:
    import triton
    import triton.language as tl

    from erlangen.gradients.kernels.norm_act import _activate, _both, _line, _over_groups, _returned

    @triton.jit
    def _read(base, pixel, channel, inside, AREA: tl.constexpr, C: tl.constexpr):
        at = base + pixel[:, None] * C + channel[None, :]
        return tl.load(at, mask=(pixel < AREA)[:, None] & inside[None, :], other=0.0).to(tl.float32)

    @triton.jit
    def _write(base, pixel, channel, inside, value, AREA: tl.constexpr, C: tl.constexpr):
        at = base + pixel[:, None] * C + channel[None, :]
        tl.store(at, value.to(base.dtype.element_ty), mask=(pixel < AREA)[:, None] & inside[None, :])

    @triton.jit
    def _forward(
        y, z, gamma, beta, mean, rstd, eps, rows, AREA: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
        BLOCK: tl.constexpr, SIZE: tl.constexpr, ONE: tl.constexpr, PRE: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, WIDTH channels (whole groups), every pixel, PIXELS at a time. pre(0) = 0."""
        n = tl.program_id(0).to(tl.int64)
        j = tl.arange(0, BLOCK)
        c = tl.program_id(1) * WIDTH + j
        inside = (j < WIDTH) & (c < C)
        own = (n // rows) * C + c
        source = y + n * (AREA * C)
        target = z + n * (AREA * C)
        if PIXELS >= AREA:  # the whole map in registers: read once
            p = tl.arange(0, PIXELS)
            m = _activate(_read(source, p, c, inside, AREA, C), PRE)
            total = tl.sum(m, 0)
            square = tl.sum(m * m, 0)
        else:
            first = tl.zeros([PIXELS, BLOCK], tl.float32)
            second = tl.zeros([PIXELS, BLOCK], tl.float32)
            for start in range(0, AREA, PIXELS):
                m = _activate(_read(source, start + tl.arange(0, PIXELS), c, inside, AREA, C), PRE)
                first += m
                second += m * m
            total = tl.sum(first, 0)
            square = tl.sum(second, 0)
        mu = _over_groups(total, BLOCK, SIZE, ONE) / (AREA * SIZE)
        variance = _over_groups(square, BLOCK, SIZE, ONE) / (AREA * SIZE) - mu * mu
        rs = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
        tl.store(mean + n * C + c, mu, mask=inside)
        tl.store(rstd + n * C + c, rs, mask=inside)
        a = tl.load(gamma + own, mask=inside, other=0.0) * rs
        b = tl.load(beta + own, mask=inside, other=0.0) - mu * a
        if PIXELS >= AREA:
            _write(target, p, c, inside, m * a[None, :] + b[None, :], AREA, C)
        else:
            for start in range(0, AREA, PIXELS):
                q = start + tl.arange(0, PIXELS)
                v = _activate(_read(source, q, c, inside, AREA, C), PRE)
                _write(target, q, c, inside, v * a[None, :] + b[None, :], AREA, C)

    @triton.jit
    def _backward(
        y, dz, dy, gamma, mean, rstd, dgamma, dbeta, rows, AREA: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
        BLOCK: tl.constexpr, SIZE: tl.constexpr, ONE: tl.constexpr, PRE: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        """dy = rs·(γ·dz − Σγ·dz/m − x̂·Σγ·dz·x̂/m)·pre'(y), the sums over a group of m entries."""
        n = tl.program_id(0).to(tl.int64)
        j = tl.arange(0, BLOCK)
        c = tl.program_id(1) * WIDTH + j
        inside = (j < WIDTH) & (c < C)
        source = y + n * (AREA * C)
        arriving = dz + n * (AREA * C)
        target = dy + n * (AREA * C)
        g = tl.load(gamma + (n // rows) * C + c, mask=inside, other=0.0)
        k = tl.load(rstd + n * C + c, mask=inside, other=0.0)
        h = -k * tl.load(mean + n * C + c, mask=inside, other=0.0)  # x̂ = k·pre(y) + h
        if PIXELS >= AREA:
            p = tl.arange(0, PIXELS)
            m, slope = _both(_read(source, p, c, inside, AREA, C), PRE)
            d = _read(arriving, p, c, inside, AREA, C)
            plain = tl.sum(d, 0)  # Σ dz
            along = tl.sum(d * _line(m, k, h), 0)  # Σ dz·x̂
        else:
            first = tl.zeros([PIXELS, BLOCK], tl.float32)
            second = tl.zeros([PIXELS, BLOCK], tl.float32)
            for start in range(0, AREA, PIXELS):
                q = start + tl.arange(0, PIXELS)
                m1 = _activate(_read(source, q, c, inside, AREA, C), PRE)
                d1 = _read(arriving, q, c, inside, AREA, C)
                first += d1
                second += d1 * _line(m1, k, h)
            plain = tl.sum(first, 0)
            along = tl.sum(second, 0)
        tl.store(dgamma + n * C + c, along, mask=inside)
        tl.store(dbeta + n * C + c, plain, mask=inside)
        s1 = k * _over_groups(g * plain, BLOCK, SIZE, ONE) / (AREA * SIZE)
        s2 = k * _over_groups(g * along, BLOCK, SIZE, ONE) / (AREA * SIZE)
        tilt = -s2 * k
        shift = -s2 * h - s1
        if PIXELS >= AREA:
            _write(target, p, c, inside, _returned(m, slope, d, g * k, tilt, shift), AREA, C)
        else:
            for start in range(0, AREA, PIXELS):
                q = start + tl.arange(0, PIXELS)
                m2, slope2 = _both(_read(source, q, c, inside, AREA, C), PRE)
                d2 = _read(arriving, q, c, inside, AREA, C)
                _write(target, q, c, inside, _returned(m2, slope2, d2, g * k, tilt, shift), AREA, C)


def _launch(y: Tensor, spec: NormAct, backward: bool) -> tuple[dict[str, int], int, int]:
    """Constants of a launch, its programs per row, and warps."""
    channels, area = y.shape[1], y.shape[2] * y.shape[3]
    size, whole = channels // spec.groups, power_of_two(area)
    width, entries, warps = _TUNED[backward, max(k for b, k in _TUNED if b == backward and k <= max(whole, 4))]
    if size == power_of_two(size):
        width = min(max(size, width), power_of_two(channels))
        block = width
    else:
        width, block = size, power_of_two(size)
    constants = {
        "AREA": area, "C": channels, "WIDTH": width, "BLOCK": block, "SIZE": size, "ONE": size == width,
        "PRE": ACTIVATIONS[spec.pre], "PIXELS": min(whole, max(16, entries // block)),
    }  # fmt: skip
    return constants, -(-channels // width), warps


def forward(y: Tensor, gamma: Tensor, beta: Tensor, spec: NormAct) -> tuple[Tensor, Tensor, Tensor]:
    """(z, μ, 1/√(var + ε)), the statistics as [n, C]; γ and β float32 and contiguous."""
    z = torch.empty_like(y, memory_format=torch.channels_last)
    mean, rstd = (torch.empty(y.shape[:2], device=y.device, dtype=torch.float32) for _ in range(2))
    constants, programs, warps = _launch(y, spec, False)
    rows = len(y) // len(gamma)
    _forward[(len(y), programs)](y, z, gamma, beta, mean, rstd, spec.eps, rows, **constants, num_warps=warps)
    return z, mean, rstd


def backward(
    y: Tensor, cotangent: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, spec: NormAct
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂y, ∂γ of every row [n, C], ∂β of every row [n, C])."""
    dy, dgamma, dbeta = torch.empty_like(y, memory_format=torch.channels_last), torch.empty_like(mean), torch.empty_like(mean)
    constants, programs, warps = _launch(y, spec, True)
    rows = len(y) // len(gamma)
    cotangent = cotangent.contiguous(memory_format=torch.channels_last)
    _backward[(len(y), programs)](
        y, cotangent, dy, gamma, mean, rstd, dgamma, dbeta, rows, **constants, num_warps=warps
    )
    return dy, dgamma, dbeta
