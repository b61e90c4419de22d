"""Equivariant layers: per-sample gradients w.r.t. the coefficients of steerable kernels, and of the norms between them.

A steerable kernel is linear in its coefficients, K = expand(θ). Each owner's gradient is therefore the adjoint of
``expand`` applied to the owner's gradient of an ordinary convolution; the basis is never formed as one matrix.
Registered by the import of `erlangen.equivariant`, so that models without such layers do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.equivariant.conv import SteerableConv2d
from erlangen.equivariant.nonlinearities import NormNonlinearity
from erlangen.equivariant.norms import EquivariantGroupNorm, FieldInstanceNorm
from erlangen.gradients.pieces import Dense, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.norm import over_positions
from erlangen.gradients.tape import Tape


class Steerable(Piece):
    """Per-owner coefficient gradients: ``pull`` (linear) takes kernel gradients [n, O, C, k, k] to [n, coefficients].

    Coefficients are fewer than kernel entries by about the order of the group, so they are kept once formed; the
    kernel gradients they come from exist a chunk of owners at a time.
    """

    prefers_dense = True

    def __init__(self, conv: Conv, pull: Callable[[Tensor], Tensor]) -> None:
        self.conv, self.pull = conv, pull

    @property
    def count(self) -> int:
        return self.conv.count

    def dense(self) -> Tensor:
        return torch.cat([self.pull(part.dense()) for part in self.conv.chunks()])

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.pull(self.conv.weighted_sum(w))

    def precise(self) -> Piece:
        return Steerable(self.conv.precise(), self.pull)  # type: ignore[arg-type]

    def chunks(self) -> list[Piece]:
        return [Steerable(part, self.pull) for part in self.conv.chunks()]  # type: ignore[arg-type]

    def zero(self, bad: Tensor) -> Piece:
        return Steerable(self.conv.zero(bad), self.pull)  # type: ignore[arg-type]


@rule(SteerableConv2d)
def steerable_convolution(module: SteerableConv2d, tape: Tape, x: Tensor) -> Tensor:
    x, geometry = conv_geometry(module, x)
    weight, bias = module.weight, module.bias
    with torch.no_grad():
        kernel, shift = module.kernel(), module.dense_bias()
    out = F.conv2d(x, kernel, shift, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        if weight.requires_grad:
            conv = Conv(saved[0], cotangent, views, kernel.shape, geometry)
            yield weight, Steerable(conv, partial(_pull, module))
        if bias is not None and bias.requires_grad:
            yield bias, Dense(module.bias_gradient(_owners(over_positions(cotangent).to(bias.dtype), views)))

    return tape.tap(out, (x,), (weight, bias), pieces)


@torch.no_grad()
def _pull(module: SteerableConv2d, gradient: Tensor) -> Tensor:
    return module.coefficient_gradient(gradient)


def conv_geometry(module: SteerableConv2d, x: Tensor) -> tuple[Tensor, Geometry]:
    """The input, padded where the native kernel cannot do it, and the convolution that remains."""
    padding = module.padding
    if module.padding_mode != "zeros" and padding:
        x, padding = F.pad(x, (padding,) * 4, mode=module.padding_mode), 0
    pair = lambda n: (n, n)  # noqa: E731
    sizes = pair(module.kernel_size), pair(module.stride), pair(padding), pair(module.dilation)
    return x, Geometry(*sizes, module.groups)


@rule(EquivariantGroupNorm, FieldInstanceNorm)
def field_norm(module: EquivariantGroupNorm | FieldInstanceNorm, tape: Tape, x: Tensor) -> Tensor:
    """out = x̂·weight + bias, both shared by the channels of a field; x̂ is recomputed in the backward pass."""
    weight, bias = module.weight, module.bias
    out = module.normalise(x, None if weight is None else weight.detach(), None if bias is None else bias.detach())
    to_bias = module.bias_gradient if isinstance(module, FieldInstanceNorm) else module.field_gradient

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        if weight is not None and weight.requires_grad:
            along = over_positions(cotangent * module.normalise(saved[0], None, None))
            yield weight, Dense(_owners(module.field_gradient(along), views))
        if bias is not None and bias.requires_grad:
            yield bias, Dense(_owners(to_bias(over_positions(cotangent)), views))

    return tape.tap(out, (x,), (weight, bias), pieces)


@rule(NormNonlinearity)
def norm_nonlinearity(module: NormNonlinearity, tape: Tape, x: Tensor) -> Tensor:
    bias = module.bias
    if bias is None:
        return module.scaled(x, None)
    fixed = bias.detach()

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(_owners(module.bias_gradient(saved[0], cotangent, fixed), views))

    return tape.tap(module.scaled(x, fixed), (x,), (bias,), pieces)


def _owners(per_row: Tensor, views: int) -> Tensor:
    """Sum over the views of each owner: [rows, …] → [owners, …]"""
    return per_row.unflatten(0, (-1, views)).sum(1) if views > 1 else per_row
