"""Activation, group normalisation, activation and 2×2 max pooling in one pass over the map, each way.

    z = pool(post(γ·x̂ + β)),   x̂ = (pre(y) − μ)/√(var + ε),   μ, var per sample over the pixels and channels of a group

Backwards, from the cotangent of z: the cotangent of y, and the gradients of γ and β of *every row*, which is all that
per-sample gradients of a normalisation need. Nothing but y and two numbers per group is kept; the rest is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, INTERPRETED, ROWS, power_of_two, whole

ACTIVATIONS = {"identity": 0, "mish": 1, "relu": 2, "silu": 3}
TWINS = {"identity": lambda x: x, "mish": F.mish, "relu": F.relu, "silu": F.silu}


@dataclass(frozen=True)
class NormAct:
    """Which layers are joined: activation before and after a norm of ``groups`` groups, and pooling."""

    groups: int
    eps: float
    pre: str = "identity"
    post: str = "identity"
    pool: bool = False


def reference(y: Tensor, gamma: Tensor, beta: Tensor, spec: NormAct) -> Tensor:
    """What the kernels compute. y: [n, C, H, W]; γ and β: [C], or [n, C] for one per row."""
    n, channels = y.shape[:2]
    x = F.group_norm(TWINS[spec.pre](y), spec.groups, eps=spec.eps)
    scale, shift = (p.expand(n, channels).reshape(n, channels, 1, 1) for p in (gamma, beta))
    z = TWINS[spec.post](x * scale + shift)
    return F.max_pool2d(z, 2) if spec.pool else z


def reference_backward(
    y: Tensor, cotangent: Tensor, gamma: Tensor, beta: Tensor, spec: NormAct
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂y, ∂γ of every row, ∂β of every row) by autograd."""
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        rows = [p.detach().expand(len(y), -1).clone().requires_grad_() for p in (gamma, beta)]
        return torch.autograd.grad(reference(leaf, rows[0], rows[1], spec), [leaf, *rows], cotangent)  # type: ignore[return-value]


if HAS_TRITON:
    import triton
    import triton.language as tl

    #: one instruction where Triton's own exp and division take a handful; these kernels wait for instructions, not for memory
    FAST = tl.constexpr(not INTERPRETED and torch.version.hip is None)

    @triton.jit
    def _exp(x):
        x = x * 1.4426950408889634
        if FAST:
            r = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        else:
            r = tl.exp2(x)
        return r

    @triton.jit
    def _inverse(x):
        if FAST:
            r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        else:
            r = 1.0 / x
        return r

    @triton.jit
    def _both(x, KIND: tl.constexpr):
        """An activation and its derivative."""
        if KIND == 1:
            e = _exp(tl.minimum(x, 20.0))  # tanh(log(1 + e)) = n/(n + 2), n = e(e + 2)
            n = e * (e + 2.0)
            i = _inverse(n + 2.0)
            t = n * i
            r = x * t
            s = t + (4.0 * x * i) * (t - e * i)  # x(1 − t²)·e/(1 + e), 1 − t² = 4(1 + e)²·i², e(1 + e)·i = t − e·i
        elif KIND == 2:
            r = tl.maximum(x, 0.0)
            s = tl.where(x > 0, 1.0, 0.0)
        elif KIND == 3:
            t = _inverse(1.0 + _exp(-x))
            r = x * t
            s = t * (1.0 + x * (1.0 - t))
        else:
            r = x
            s = tl.zeros_like(x) + 1.0
        return r, s

    @triton.jit
    def _activate(x, KIND: tl.constexpr):
        r, _ = _both(x, KIND)
        return r

    @triton.jit
    def _slope(x, KIND: tl.constexpr):
        _, s = _both(x, KIND)
        return s

    @triton.jit
    def _over_groups(s, BLOCK: tl.constexpr, SIZE: tl.constexpr, ONE: tl.constexpr):
        """Sum a vector of channels over the groups they belong to, and spread the sums back."""
        if ONE:
            r = tl.zeros([BLOCK], tl.float32) + tl.sum(s, 0)
        else:
            q = tl.sum(tl.reshape(s, [BLOCK // SIZE, SIZE]), 1)
            r = tl.reshape(tl.broadcast_to(q[:, None], [BLOCK // SIZE, SIZE]), [BLOCK])
        return r

    @triton.jit
    def _tile(base, pixel, channel, inside, C: tl.constexpr):
        return tl.load(base + pixel[:, None] * C + channel[None, :], mask=inside[None, :], other=0.0).to(tl.float32)

    @triton.jit
    def _put(base, pixel, channel, inside, value, C: tl.constexpr):
        at = base + pixel[:, None] * C + channel[None, :]
        tl.store(at, value.to(base.dtype.element_ty), mask=inside[None, :])

    @triton.jit
    def _forward(
        y, z, gamma, beta, mean, rstd, eps, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
        BLOCK: tl.constexpr, SIZE: tl.constexpr, ONE: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
        POOL: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        """One program: one row, WIDTH channels (whole groups), every pixel, PIXELS at a time."""
        AREA: tl.constexpr = H * W
        j = tl.arange(0, BLOCK)
        c = tl.program_id(0) * WIDTH + j
        inside = (j < WIDTH) & (c < C)
        n = tl.program_id(1).to(tl.int64)
        source = y + n * AREA * C
        if PIXELS >= AREA:  # the whole map in registers: read once, in quarters if they are pooled
            if POOL:
                q = tl.arange(0, AREA // 4)
                p = (q // (W // 2)) * 2 * W + (q % (W // 2)) * 2
                m0 = _activate(_tile(source, p, c, inside, C), PRE)
                m1 = _activate(_tile(source, p + 1, c, inside, C), PRE)
                m2 = _activate(_tile(source, p + W, c, inside, C), PRE)
                m3 = _activate(_tile(source, p + W + 1, c, inside, C), PRE)
                total = tl.sum(m0 + m1 + m2 + m3, 0)
                square = tl.sum(m0 * m0 + m1 * m1 + m2 * m2 + m3 * m3, 0)
            else:
                p = tl.arange(0, PIXELS)
                m = _activate(_tile(source, p, c, inside, C), PRE)
                total = tl.sum(m, 0)
                square = tl.sum(m * m, 0)
        else:
            first = tl.zeros([PIXELS, BLOCK], tl.float32)
            second = tl.zeros([PIXELS, BLOCK], tl.float32)
            for start in range(0, AREA, PIXELS):
                m = _activate(_tile(source, start + tl.arange(0, PIXELS), c, inside, C), PRE)
                first += m
                second += m * m
            total = tl.sum(first, 0)
            square = tl.sum(second, 0)
        mu = _over_groups(total, BLOCK, SIZE, ONE) / (AREA * SIZE)
        variance = _over_groups(square, BLOCK, SIZE, ONE) / (AREA * SIZE) - mu * mu
        rs = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
        tl.store(mean + n * C + c, mu, mask=inside)
        tl.store(rstd + n * C + c, rs, mask=inside)
        a = tl.load(gamma + c, mask=inside, other=0.0) * rs
        b = tl.load(beta + c, mask=inside, other=0.0) - mu * a
        if POOL and PIXELS >= AREA:
            best = tl.maximum(
                _activate(m0 * a[None, :] + b[None, :], POST), _activate(m1 * a[None, :] + b[None, :], POST)
            )
            best = tl.maximum(best, _activate(m2 * a[None, :] + b[None, :], POST))
            best = tl.maximum(best, _activate(m3 * a[None, :] + b[None, :], POST))
            _put(z + n * (AREA // 4) * C, q, c, inside, best, C)
        elif POOL:
            QUARTER: tl.constexpr = PIXELS // 4
            HALF: tl.constexpr = W // 2
            for start in range(0, AREA // 4, QUARTER):
                q = start + tl.arange(0, QUARTER)
                p = (q // HALF) * 2 * W + (q % HALF) * 2
                best = _activate(_activate(_tile(source, p, c, inside, C), PRE) * a[None, :] + b[None, :], POST)
                for k in tl.static_range(1, 4):
                    there = _activate(_tile(source, p + (k // 2) * W + k % 2, c, inside, C), PRE)
                    best = tl.maximum(best, _activate(there * a[None, :] + b[None, :], POST))
                _put(z + n * (AREA // 4) * C, q, c, inside, best, C)
        elif PIXELS >= AREA:
            _put(z + n * AREA * C, p, c, inside, _activate(m * a[None, :] + b[None, :], POST), C)
        else:
            for start in range(0, AREA, PIXELS):
                p = start + tl.arange(0, PIXELS)
                o = _activate(_tile(source, p, c, inside, C), PRE) * a[None, :] + b[None, :]
                _put(z + n * AREA * C, p, c, inside, _activate(o, POST), C)

    @triton.jit
    def _window(base, p, c, inside, W: tl.constexpr, C: tl.constexpr):
        """The four entries of the 2×2 windows whose first ones are at p."""
        v0 = _tile(base, p, c, inside, C)
        v1 = _tile(base, p + 1, c, inside, C)
        v2 = _tile(base, p + W, c, inside, C)
        v3 = _tile(base, p + W + 1, c, inside, C)
        return v0, v1, v2, v3

    @triton.jit
    def _line(m, a, b):
        """a·m + b with a and b per channel."""
        return m * a[None, :] + b[None, :]

    @triton.jit
    def _won(d, o0, o1, o2, o3, POST: tl.constexpr):
        """The cotangent of a window's largest entry, back through post, at the entry that is the first to have it."""
        z0, t0 = _both(o0, POST)
        z1, t1 = _both(o1, POST)
        z2, t2 = _both(o2, POST)
        z3, t3 = _both(o3, POST)
        best = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))
        w0 = z0 == best
        w1 = z1 == best
        w2 = z2 == best
        d0 = tl.where(w0, d * t0, 0.0)
        d1 = tl.where(w0, 0.0, tl.where(w1, d * t1, 0.0))
        d2 = tl.where(w0 | w1, 0.0, tl.where(w2, d * t2, 0.0))
        d3 = tl.where(w0 | w1 | w2, 0.0, d * t3)
        return d0, d1, d2, d3

    @triton.jit
    def _returned(m, slope, d, a, along, shift):
        """(a·do + along·pre(y) + shift)·pre'(y), which is rs·(γ·do − s1 − x̂·s2)·pre'(y)."""
        return (d * a[None, :] + _line(m, along, shift)) * slope

    @triton.jit
    def _backward(
        y, dz, dy, gamma, beta, mean, rstd, dgamma, dbeta, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, ONE: tl.constexpr, PRE: tl.constexpr,
        POST: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr,
    ):  # fmt: skip
        """dy = rs·(γ·do − Σγ·do/m − x̂·Σγ·do·x̂/m)·pre'(y), the sums over a group of m entries; do = dz·post'.

        With k = rs and h = −μ·rs it is x̂ = k·pre(y) + h, and what post sees is a·pre(y) + b.
        """
        AREA: tl.constexpr = H * W
        j = tl.arange(0, BLOCK)
        c = tl.program_id(0) * WIDTH + j
        inside = (j < WIDTH) & (c < C)
        n = tl.program_id(1).to(tl.int64)
        source = y + n * AREA * C
        target = dy + n * AREA * C
        g = tl.load(gamma + c, mask=inside, other=0.0)
        k = tl.load(rstd + n * C + c, mask=inside, other=0.0)
        h = -k * tl.load(mean + n * C + c, mask=inside, other=0.0)
        a = g * k
        b = g * h + tl.load(beta + c, mask=inside, other=0.0)
        if POOL:
            QUARTER: tl.constexpr = PIXELS // 4
            HALF: tl.constexpr = W // 2
            arriving = dz + n * (AREA // 4) * C
        if POOL and PIXELS >= AREA:  # the whole map in registers: read once, its activation taken once
            q = tl.arange(0, AREA // 4)
            p = (q // HALF) * 2 * W + (q % HALF) * 2
            d = _tile(arriving, q, c, inside, C)
            v0, v1, v2, v3 = _window(source, p, c, inside, W, C)
            m0, t0 = _both(v0, PRE)
            m1, t1 = _both(v1, PRE)
            m2, t2 = _both(v2, PRE)
            m3, t3 = _both(v3, PRE)
            d0, d1, d2, d3 = _won(d, _line(m0, a, b), _line(m1, a, b), _line(m2, a, b), _line(m3, a, b), POST)
            plain = tl.sum(d0 + d1 + d2 + d3, 0)  # Σ do
            along = tl.sum(
                d0 * _line(m0, k, h) + d1 * _line(m1, k, h) + d2 * _line(m2, k, h) + d3 * _line(m3, k, h), 0
            )  # Σ do·x̂
        elif POOL:
            first = tl.zeros([QUARTER, BLOCK], tl.float32)
            second = tl.zeros([QUARTER, BLOCK], tl.float32)
            for start in range(0, AREA // 4, QUARTER):
                q = start + tl.arange(0, QUARTER)
                p = (q // HALF) * 2 * W + (q % HALF) * 2
                d = _tile(arriving, q, c, inside, C)
                m = _activate(_tile(source, p, c, inside, C), PRE)  # the winner's, found as we go
                o = _line(m, a, b)
                best = _activate(o, POST)
                for i in tl.static_range(1, 4):
                    m1 = _activate(_tile(source, p + (i // 2) * W + i % 2, c, inside, C), PRE)
                    o1 = _line(m1, a, b)
                    z1 = _activate(o1, POST)
                    wins = z1 > best
                    m = tl.where(wins, m1, m)
                    o = tl.where(wins, o1, o)
                    best = tl.where(wins, z1, best)
                d = d * _slope(o, POST)
                first += d
                second += d * _line(m, k, h)
            plain = tl.sum(first, 0)
            along = tl.sum(second, 0)
        elif PIXELS >= AREA:
            p = tl.arange(0, PIXELS)
            m, slope = _both(_tile(source, p, c, inside, C), PRE)
            d = _tile(dz + n * AREA * C, p, c, inside, C) * _slope(_line(m, a, b), POST)
            plain = tl.sum(d, 0)
            along = tl.sum(d * _line(m, k, h), 0)
        else:
            first = tl.zeros([PIXELS, BLOCK], tl.float32)
            second = tl.zeros([PIXELS, BLOCK], tl.float32)
            for start in range(0, AREA, PIXELS):
                p = start + tl.arange(0, PIXELS)
                m = _activate(_tile(source, p, c, inside, C), PRE)
                d = _tile(dz + n * AREA * C, p, c, inside, C) * _slope(_line(m, a, b), POST)
                first += d
                second += d * _line(m, k, h)
            plain = tl.sum(first, 0)
            along = tl.sum(second, 0)
        tl.store(dgamma + n * C + c, along, mask=inside)
        tl.store(dbeta + n * C + c, plain, mask=inside)
        s1 = k * _over_groups(g * plain, BLOCK, SIZE, ONE) / (AREA * SIZE)
        s2 = k * _over_groups(g * along, BLOCK, SIZE, ONE) / (AREA * SIZE)
        tilt = -s2 * k
        shift = -s2 * h - s1
        if POOL and PIXELS >= AREA:
            _put(target, p, c, inside, _returned(m0, t0, d0, a, tilt, shift), C)
            _put(target, p + 1, c, inside, _returned(m1, t1, d1, a, tilt, shift), C)
            _put(target, p + W, c, inside, _returned(m2, t2, d2, a, tilt, shift), C)
            _put(target, p + W + 1, c, inside, _returned(m3, t3, d3, a, tilt, shift), C)
        elif POOL:
            for start in range(0, AREA // 4, QUARTER):
                q = start + tl.arange(0, QUARTER)
                p = (q // HALF) * 2 * W + (q % HALF) * 2
                d = _tile(arriving, q, c, inside, C)
                v0, v1, v2, v3 = _window(source, p, c, inside, W, C)
                m0, t0 = _both(v0, PRE)
                m1, t1 = _both(v1, PRE)
                m2, t2 = _both(v2, PRE)
                m3, t3 = _both(v3, PRE)
                d0, d1, d2, d3 = _won(d, _line(m0, a, b), _line(m1, a, b), _line(m2, a, b), _line(m3, a, b), POST)
                _put(target, p, c, inside, _returned(m0, t0, d0, a, tilt, shift), C)
                _put(target, p + 1, c, inside, _returned(m1, t1, d1, a, tilt, shift), C)
                _put(target, p + W, c, inside, _returned(m2, t2, d2, a, tilt, shift), C)
                _put(target, p + W + 1, c, inside, _returned(m3, t3, d3, a, tilt, shift), C)
        elif PIXELS >= AREA:
            _put(target, p, c, inside, _returned(m, slope, d, a, tilt, shift), C)
        else:
            for start in range(0, AREA, PIXELS):
                p = start + tl.arange(0, PIXELS)
                m, slope = _both(_tile(source, p, c, inside, C), PRE)
                d = _tile(dz + n * AREA * C, p, c, inside, C) * _slope(_line(m, a, b), POST)
                _put(target, p, c, inside, _returned(m, slope, d, a, tilt, shift), C)


def fits(y: Tensor, spec: NormAct) -> bool:
    """Maps the kernels can work on: a power of two of pixels (of windows, if pooled), and groups that a program holds."""
    area, size = y.shape[2] * y.shape[3], y.shape[1] // spec.groups
    even = y.shape[2] % 2 == 0 and y.shape[3] % 2 == 0
    return area == power_of_two(area) and area >= 4 and (even or not spec.pool) and power_of_two(size) <= 1024


#: (backward, pixels, pooled) → (channels of a program, entries of a tile, warps), measured best on an H200; the nearest
#: smaller map's entry serves maps that are not listed
_TUNED = {
    (False, 4): (64, 1024, 2), (False, 32): (32, 2048, 4), (False, 128): (32, 8192, 4), (False, 512): (16, 16384, 8),
    (True, 4): (32, 1024, 2), (True, 32): (32, 2048, 4), (True, 128): (32, 2048, 4), (True, 512): (32, 16384, 8),
}  # fmt: skip
_TUNED_POOLED = {
    (False, 4): (32, 1024, 2), (False, 32): (32, 2048, 4), (False, 128): (32, 8192, 4), (False, 512): (16, 16384, 8),
    (True, 4): (32, 2048, 4), (True, 512): (16, 4096, 4),
}  # fmt: skip


def _launch(y: Tensor, spec: NormAct, backward: bool) -> tuple[dict[str, int], int, int]:
    """Constants of a launch, its programs per row, and warps."""
    channels, area = y.shape[1], y.shape[2] * y.shape[3]
    size = channels // spec.groups
    table = _TUNED_POOLED if spec.pool else _TUNED
    width, entries, warps = table[backward, max(k for b, k in table if b == backward and k <= max(area, 4))]
    if size == power_of_two(size):
        width = min(max(size, width), power_of_two(channels))
        block = width
    else:
        width, block = size, power_of_two(size)
    pixels = min(area, max(16, entries // block))
    constants = {
        "H": y.shape[2], "W": y.shape[3], "C": channels, "WIDTH": width, "BLOCK": block, "SIZE": size,
        "ONE": size == width, "PRE": ACTIVATIONS[spec.pre], "POST": ACTIVATIONS[spec.post], "POOL": spec.pool,
        "PIXELS": pixels,
    }  # fmt: skip
    return constants, -(-channels // width), warps


def forward(y: Tensor, gamma: Tensor, beta: Tensor, spec: NormAct) -> tuple[Tensor, Tensor, Tensor]:
    """(z, μ, 1/√(var + ε)), the statistics as [n, C]. y must be channels-last."""
    if len(y) > ROWS:
        return whole(forward(part, gamma, beta, spec) for part in y.split(ROWS))
    rows, channels, height, width = y.shape
    half = 2 if spec.pool else 1
    z = torch.empty(
        rows, channels, height // half, width // half, device=y.device, dtype=y.dtype, memory_format=torch.channels_last
    )
    mean, rstd = (torch.empty(rows, channels, device=y.device, dtype=torch.float32) for _ in range(2))
    constants, programs, warps = _launch(y, spec, False)
    _forward[(programs, rows)](y, z, gamma, beta, mean, rstd, spec.eps, **constants, num_warps=warps)
    return z, mean, rstd


def backward(
    y: Tensor, cotangent: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, rstd: Tensor, spec: NormAct
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂y, ∂γ of every row [n, C], ∂β of every row [n, C])."""
    if len(y) > ROWS:
        parts = zip(*(t.split(ROWS) for t in (y, cotangent, mean, rstd)), strict=True)
        return whole(backward(a, b, gamma, beta, c, d, spec) for a, b, c, d in parts)
    dy = torch.empty_like(y, memory_format=torch.channels_last)
    dgamma, dbeta = torch.empty_like(mean), torch.empty_like(mean)
    constants, programs, warps = _launch(y, spec, True)
    cotangent = cotangent.contiguous(memory_format=torch.channels_last)
    _backward[(programs, len(y))](
        y, cotangent, dy, gamma, beta, mean, rstd, dgamma, dbeta, **constants, num_warps=warps
    )
    return dy, dgamma, dbeta
