"""Layers of band-limited fields by kernels of their own on a GPU: the Fourier nonlinearity and the norm by fields.

Each is one differentiable operation that reads channels-last maps a few times, in place of some dozen passes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from erlangen.equivariant.nonlinearities import FourierNonlinearity
from erlangen.equivariant.norms import FieldInstanceNorm
from erlangen.gradients.joined import activation_name, has_hooks
from erlangen.gradients.kernels import fourier, lines, usable
from erlangen.gradients.precision import exact_float32
from erlangen.gradients.tape import Tape

#: one row's gradients of weight [n, fields] and bias [n, invariants]
Record = Callable[[Tensor, Tensor], None]


def suits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the kernels can work on this map as it lies in memory."""
    return (
        x.dim() == 4
        and x.numel() > 0
        and usable(x)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.is_contiguous(memory_format=torch.channels_last)
        and all(p is None or p.dtype == torch.float32 for p in parameters)
    )


class _Fourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, function: str) -> Tensor:
        ctx.save_for_backward(x, up, down)
        ctx.function = function
        return fourier.forward(x, up, down, function)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, up, down = ctx.saved_tensors
        return fourier.backward(x, cotangent, up, down, ctx.function), None, None, None


def fourier_nonlinearity(module: FourierNonlinearity, tape: Tape | None, x: Tensor) -> Tensor:
    name = activation_name(module.function)
    if name is None or has_hooks(module.function) or not suits(x, module.samples):
        return type(module).forward(module, x)
    return _Fourier.apply(x, module.samples * module.gain, module.samples / module.gain, name)


class _FieldNorm(torch.autograd.Function):
    """out = s·(x − μ) + shift, s = weight/√(λ + ε); μ = P·mean(x), P the projector onto invariants; λ the mean of (x − μ)²."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: FieldInstanceNorm, record: Record | None
    ) -> Tensor:
        area = x.shape[2] * x.shape[3]
        with exact_float32():
            total, square = lines.sums(x, x)
            mean = total / area
            mu = mean @ norm.invariants @ norm.invariants.T
            variance = ((square / area - 2 * mu * mean + mu.square()) @ norm.spread).clamp(min=0)
            inverse = torch.rsqrt(variance + norm.eps)
            scale = norm.to_channels(inverse if weight is None else inverse * weight)
            shift = -mu * scale if bias is None else norm.invariants @ bias - mu * scale
        ctx.save_for_backward(x, mean, mu, inverse, weight)
        ctx.norm, ctx.record, ctx.has_bias = norm, record, bias is not None
        return lines.line(x, scale.contiguous(), shift.contiguous())

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """dx = s·do + k·(x − μ) − P·mean(s·do + k·(x − μ)), k = −weight·⟨do, x − μ⟩/(d·area)·(λ + ε)^(−3/2)."""
        x, mean, mu, inverse, weight = ctx.saved_tensors
        norm: FieldInstanceNorm = ctx.norm
        area = x.shape[2] * x.shape[3]
        cotangent = cotangent.to(x.dtype).contiguous(memory_format=torch.channels_last)
        with exact_float32():
            total, product = lines.sums(cotangent, x)
            along = (product - mu * total) @ norm.spread  # ⟨do, x − μ⟩/d
            by_field = inverse if weight is None else inverse * weight
            scale = norm.to_channels(by_field)
            tilt = norm.to_channels(-by_field * inverse.square() * along / area)
            returned = scale * total / area + tilt * (mean - mu)
            shift = -tilt * mu - returned @ norm.invariants @ norm.invariants.T
            dweight, dbias = inverse * along * norm.sizes, total @ norm.invariants
        dx = lines.line(cotangent, scale.contiguous(), shift.contiguous(), x, tilt.contiguous())
        if ctx.record is not None:
            ctx.record(dweight, dbias)
            return dx, None, None, None, None
        return dx, None if weight is None else dweight.sum(0), dbias.sum(0) if ctx.has_bias else None, None, None


def field_instance_norm(module: FieldInstanceNorm, tape: Tape | None, x: Tensor) -> Tensor:
    """On a map that `suits`; with a tape, every row's gradients of weight and bias are recorded."""
    weight, bias = module.weight, module.bias
    if tape is None:
        return _FieldNorm.apply(x, weight, bias, module, None)
    batch = tape.batch

    def record(dweight: Tensor, dbias: Tensor) -> None:
        wanted: dict[Tensor, Tensor] = {p: g for p, g in ((weight, dweight), (bias, dbias)) if p is not None and p.requires_grad}
        tape._capture_rows(wanted, len(dweight), batch)

    return _FieldNorm.apply(x, weight, bias, module, record)


def plain_field_norm(module: FieldInstanceNorm, tape: Tape | None, x: Tensor) -> Tensor:
    """In ordinary training and evaluation."""
    suited = suits(x, module.weight, module.bias, module.spread)
    return field_instance_norm(module, None, x) if suited else type(module).forward(module, x)
