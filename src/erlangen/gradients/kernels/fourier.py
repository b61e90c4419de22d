"""A function on samples of the group, between two transforms, in one pass over the map each way.

    z = Bᵀ·f(A·x)   for every field of d coefficients at every pixel,   A, B: [samples, d]

The samples, more than twice as many as coefficients, are never written to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.kernels import HAS_TRITON, power_of_two
from erlangen.gradients.kernels.norm_act import ACTIVATIONS, TWINS

#: fields (of one pixel) of a program
FIELDS = 128


def reference(x: Tensor, up: Tensor, down: Tensor, function: str) -> Tensor:
    """x: [n, fields·d, H, W]; A = ``up``, B = ``down``."""
    fields = x.unflatten(1, (-1, up.shape[1]))
    samples = TWINS[function](torch.einsum("gd,nfd...->nfg...", up, fields))
    return torch.einsum("gd,nfg...->nfd...", down, samples).flatten(1, 2)


def reference_backward(x: Tensor, cotangent: Tensor, up: Tensor, down: Tensor, function: str) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(reference(leaf, up, down, function), leaf, cotangent)[0]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from erlangen.gradients.kernels.norm_act import _activate, _slope

    @triton.jit
    def _times(v, matrix):
        """v @ matrix. The matrix keeps 16 bits of mantissa and more beside 16-bit values: what it rounds to, and the rest."""
        if v.dtype == tl.float32:
            r = tl.dot(v, matrix, input_precision="ieee")
        else:
            near = matrix.to(v.dtype)
            rest = (matrix - near.to(tl.float32)).to(v.dtype)
            r = tl.dot(v, near) + tl.dot(v, rest)
        return r

    @triton.jit
    def _matrix(m, D: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, TURNED: tl.constexpr):
        """[samples, d] in memory, with zeros around it; or its transpose."""
        g = tl.arange(0, TALL)
        k = tl.arange(0, WIDE)
        if TURNED:
            at = g[None, :] * D + k[:, None]
            r = tl.load(m + at, mask=(g < SAMPLES)[None, :] & (k < D)[:, None], other=0.0)
        else:
            at = g[:, None] * D + k[None, :]
            r = tl.load(m + at, mask=(g < SAMPLES)[:, None] & (k < D)[None, :], other=0.0)
        return r

    @triton.jit
    def _forward(
        x, z, up, down, count, D: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
        KIND: tl.constexpr, FIELDS: tl.constexpr,
    ):  # fmt: skip
        f = tl.program_id(0).to(tl.int64) * FIELDS + tl.arange(0, FIELDS)
        k = tl.arange(0, WIDE)
        at = f[:, None] * D + k[None, :]
        live = (f < count)[:, None] & (k < D)[None, :]
        v = tl.load(x + at, mask=live, other=0.0)
        samples = _activate(_times(v, _matrix(up, D, SAMPLES, WIDE, TALL, True)), KIND)
        back = _times(samples.to(v.dtype), _matrix(down, D, SAMPLES, WIDE, TALL, False))
        tl.store(z + at, back.to(z.dtype.element_ty), mask=live)

    @triton.jit
    def _backward(
        x, dz, dx, up, down, count, D: tl.constexpr, SAMPLES: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
        KIND: tl.constexpr, FIELDS: tl.constexpr,
    ):  # fmt: skip
        """dx = Aᵀ·(f'(A·x) ∘ B·dz)"""
        f = tl.program_id(0).to(tl.int64) * FIELDS + tl.arange(0, FIELDS)
        k = tl.arange(0, WIDE)
        at = f[:, None] * D + k[None, :]
        live = (f < count)[:, None] & (k < D)[None, :]
        v = tl.load(x + at, mask=live, other=0.0)
        d = tl.load(dz + at, mask=live, other=0.0)
        slope = _slope(_times(v, _matrix(up, D, SAMPLES, WIDE, TALL, True)), KIND)
        arriving = _times(d, _matrix(down, D, SAMPLES, WIDE, TALL, True)) * slope
        back = _times(arriving.to(v.dtype), _matrix(up, D, SAMPLES, WIDE, TALL, False))
        tl.store(dx + at, back.to(dx.dtype.element_ty), mask=live)


def _constants(x: Tensor, up: Tensor, function: str) -> tuple[int, dict[str, int]]:
    samples, d = up.shape
    return x.numel() // d, {
        "D": d, "SAMPLES": samples, "WIDE": max(16, power_of_two(d)), "TALL": max(16, power_of_two(samples)),
        "KIND": ACTIVATIONS[function], "FIELDS": FIELDS,
    }  # fmt: skip


def forward(x: Tensor, up: Tensor, down: Tensor, function: str) -> Tensor:
    """As `reference`; x must be channels-last, the matrices are float32."""
    count, constants = _constants(x, up, function)
    z = torch.empty_like(x, memory_format=torch.channels_last)
    _forward[(-(-count // FIELDS),)](x, z, up.contiguous(), down.contiguous(), count, **constants, num_warps=4)
    return z


def backward(x: Tensor, cotangent: Tensor, up: Tensor, down: Tensor, function: str) -> Tensor:
    count, constants = _constants(x, up, function)
    cotangent = cotangent.to(x.dtype).contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    _backward[(-(-count // FIELDS),)](x, cotangent, dx, up.contiguous(), down.contiguous(), count, **constants, num_warps=4)
    return dx
