"""Equivariant layers: per-sample gradients w.r.t. the coefficients of steerable kernels, and of the norms between them.

A steerable kernel is linear in its coefficients, K = expand(θ). Each owner's gradient is therefore the adjoint of
``expand`` applied to the owner's gradient of an ordinary convolution; the basis is never formed as one matrix.
Registered by the import of `erlangen.equivariant`, so that models without such layers do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.equivariant import bags, on_maps
from erlangen.equivariant.conv import SteerableConv2d
from erlangen.equivariant.nonlinearities import FourierNonlinearity, NormNonlinearity, Pointwise
from erlangen.equivariant.norms import EquivariantGroupNorm, FieldInstanceNorm
from erlangen.equivariant.pooling import SpatialAvgPool, SpatialMaxPool
from erlangen.equivariant.tied import TiedCopies, coefficient_gradients, jacobian, tied_copies
from erlangen.gradients.joined import (
    NormLayer,
    activation_name,
    joinable_activation,
    joinable_norm,
    joinable_pool,
    norm_layer,
    own_kernel,
    suits,
)
from erlangen.gradients.joined import apply as joined
from erlangen.gradients.kernels import usable
from erlangen.gradients.kernels.conv2d import compute_dtype
from erlangen.gradients.kernels.norm_act import NormAct
from erlangen.gradients.pieces import Dense, Piece, Weight
from erlangen.gradients.pooling import averaged
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rules.conv import Conv, Geometry, Windows, computed
from erlangen.gradients.rules.norm import over_positions
from erlangen.gradients.sums import over_views, row_sum, squared_norms
from erlangen.gradients.tape import Tape


class Steerable(Piece):
    """Per-owner coefficient gradients: ``pull`` (linear) takes kernel gradients [n, O, C, k, k] to [n, coefficients].

    Coefficients are fewer than kernel entries by about the order of the group, so they are kept once formed; the
    kernel gradients they come from exist a chunk of owners at a time. ``direct`` goes from a chunk to its coefficients another
    way, where there is one.
    """

    prefers_dense = True

    def __init__(
        self,
        conv: Conv | Windows,
        pull: Callable[[Tensor], Tensor],
        fused: Callable[[Tensor], Piece] | None = None,
        direct: Callable[[Conv], Tensor] | None = None,
    ) -> None:
        self.conv, self.pull, self.fused, self.direct = conv, pull, fused, direct

    @property
    def count(self) -> int:
        return self.conv.count

    def dense(self) -> Tensor:
        if self.direct is not None:
            return torch.cat([self.direct(part) for part in self.conv.chunks()])  # type: ignore[arg-type]
        return torch.cat([self.pull(part.dense()) for part in self.conv.chunks()])

    def formed(self) -> Piece:
        if self.fused is None or not self.count:
            return super().formed()
        parts = [self.fused(part.by_tap()) for part in self.conv.chunks()]  # type: ignore[attr-defined]
        return parts[0] if len(parts) == 1 else Ordered.joined(parts)  # type: ignore[arg-type]

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.sum_of_formed(w) if self.measured_formed else self.pull(self.conv.weighted_sum(w))

    def precise(self) -> Piece:
        return Steerable(self.conv.precise(), self.pull, None, self.direct)  # type: ignore[arg-type]

    def chunks(self) -> list[Piece]:
        return [Steerable(part, self.pull, None, self.direct) for part in self.conv.chunks()]  # type: ignore[arg-type]

    def zero(self, bad: Tensor) -> Piece:
        return Steerable(self.conv.zero(bad), self.pull, None, self.direct)  # type: ignore[arg-type]


class Ordered(Piece):
    """Gradients [n, d] kept in another order of the coordinates: place q holds coordinate ``order[q]``."""

    def __init__(self, g: Tensor, order: Tensor, norms: Tensor) -> None:
        self.g, self.order, self.norms = g, order, norms

    @classmethod
    def joined(cls, parts: list[Ordered]) -> Ordered:
        g, norms = torch.cat([p.g for p in parts]), torch.cat([p.norms for p in parts])
        return cls(g, parts[0].order, norms)

    @property
    def count(self) -> int:
        return len(self.g)

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return usable(self.g)

    def dense(self) -> Tensor:
        return torch.empty_like(self.g).index_copy_(1, self.order, self.g)

    def formed(self) -> Piece:
        return self

    def weighted_sum(self, w: Tensor) -> Tensor:
        total = row_sum(w, self.g)
        return torch.empty_like(total).index_copy_(0, self.order, total)

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is None:
            return self.norms
        if isinstance(weight, Tensor):
            return squared_norms(self.g * weight[self.order])
        return super().norms_squared(weight)

    def zero(self, bad: Tensor) -> Piece:
        return Ordered(torch.where(bad[:, None], 0.0, self.g), self.order, torch.where(bad, 0.0, self.norms))


@rule(SteerableConv2d)
def steerable_convolution(module: SteerableConv2d, tape: Tape, x: Tensor) -> Tensor:
    x, geometry = conv_geometry(module, x)
    weight, bias = module.weight, module.bias
    kernel, shift, fused = _expanded(module, tape, x)
    out, kept, of_kernel = computed(x, kernel, shift, geometry)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        if weight.requires_grad:
            conv = of_kernel(saved[0], cotangent, views)
            direct = partial(_direct, module) if isinstance(conv, Conv) and geometry.groups == 1 else None
            yield weight, Steerable(conv, partial(_pull, module), fused, direct)
        if bias is not None and bias.requires_grad:
            yield bias, Dense(module.bias_gradient(over_views(over_positions(cotangent).to(bias.dtype), views)))

    return tape.tap(out, (kept,), (weight, bias), pieces)


Form = Callable[[Tensor], Piece]
#: beside the modules, not in them: copies and pickles of a module stay ordinary
_EXPANDED: WeakKeyDictionary[SteerableConv2d, tuple[Any, tuple[Tensor, Tensor | None, Form | None]]] = WeakKeyDictionary()
_TIED: WeakKeyDictionary[SteerableConv2d, dict[torch.device, TiedCopies | None]] = WeakKeyDictionary()


@torch.no_grad()
def _expanded(module: SteerableConv2d, tape: Tape, x: Tensor) -> tuple[Tensor, Tensor | None, Form | None]:
    """The dense kernel, the dense bias, and the fused way to coefficient gradients where there is one.

    On a GPU they are kept until the parameters change: the physical parts of a logical batch share them. Parameters that
    were written to behind autograd's back (``p.data``) keep their version, so that no other batch may have them.
    """
    if not usable(x):
        return module.kernel(), module.dense_bias(), None
    dtype = compute_dtype(x)
    state = tuple((p.data_ptr(), p._version) for p in (module.weight, module.bias) if p is not None)
    known = _EXPANDED.get(module)
    key = state, dtype, id(tape), tape.logical
    if known is not None and known[0] == key:
        return known[1]
    kernel, shift = module.kernel(), module.dense_bias()
    form = _fused(module) if module.groups == 1 and module.weight.dtype == torch.float32 else None
    result = kernel.to(dtype, memory_format=torch.channels_last), shift, form
    _EXPANDED[module] = (key, result)
    return result


def _fused(module: SteerableConv2d) -> Form | None:
    """Kernel gradients [n, C_out, taps, C_in] → coefficient gradients in one pass, where kernels are orbit sums."""
    tables, device = _tied(module), module.weight.device
    if tables is None:
        return None
    length = tables.order.numel()
    standard = jacobian(module.expansion, module.weight, module.eps, tables.order) if module.standardise else None
    order = (torch.arange(tables.fields, device=device)[:, None] * length + tables.order).flatten()

    def form(kernels: Tensor) -> Piece:
        g, norms = coefficient_gradients(kernels, tables, standard)
        return Ordered(g, order, norms)

    return form


def _tied(module: SteerableConv2d) -> TiedCopies | None:
    """Where copies lie, on the device of the module's weights."""
    held, device = _TIED.setdefault(module, {}), module.weight.device
    if device not in held:
        tables = tied_copies(module.expansion)
        held[device] = None if tables is None else tables.to(device)
    return held[device]


@torch.no_grad()
def _pull(module: SteerableConv2d, gradient: Tensor) -> Tensor:
    return module.coefficient_gradient(gradient)


@torch.no_grad()
def _direct(module: SteerableConv2d, conv: Conv) -> Tensor:
    """Where positions are few, without kernel gradients; where copies are tied, without those of all owners."""
    if module.expansion.contraction_is_cheaper(conv.tokens):
        return module.contracted_gradient(*conv.windows())
    if conv.d.dtype == module.weight.dtype and bags.suits(conv, module.expansion):
        with torch.autocast(conv.d.device.type, enabled=False):
            return module.standardised_gradient(bags.coefficient_gradients(conv, module.expansion))
    return module.coefficient_gradient(conv.dense())


def conv_geometry(module: SteerableConv2d, x: Tensor) -> tuple[Tensor, Geometry]:
    """The input, padded where the native kernel cannot do it, and the convolution that remains."""
    padding = module.padding
    if module.padding_mode != "zeros" and padding:
        x, padding = F.pad(x, (padding,) * 4, mode=module.padding_mode), 0
    pair = lambda n: (n, n)  # noqa: E731
    sizes = pair(module.kernel_size), pair(module.stride), pair(padding), pair(module.dilation)
    return x, Geometry(*sizes, module.groups)


joinable_activation(Pointwise, lambda module: activation_name(module.function))
joinable_pool(SpatialMaxPool, lambda module: (module.kernel_size, module.stride, module.padding) == (2, 2, 0))
joinable_norm(
    EquivariantGroupNorm,
    lambda m: None if m.per_element else NormLayer(m, m.groups, m.eps, m.per_channel, m.field_gradient),
)
own_kernel(SpatialAvgPool, averaged)
own_kernel(FourierNonlinearity, on_maps.fourier_nonlinearity)
own_kernel(FieldInstanceNorm, on_maps.plain_field_norm)


@rule(EquivariantGroupNorm, FieldInstanceNorm)
def field_norm(module: EquivariantGroupNorm | FieldInstanceNorm, tape: Tape, x: Tensor) -> Tensor:
    """out = x̂·weight + bias, both shared by the channels of a field; x̂ is recomputed in the backward pass."""
    if (norm := norm_layer(module)) is not None and suits(x, spec := NormAct(norm.groups, norm.eps)):
        return joined(x, norm, spec, tape)
    weight, bias = module.weight, module.bias
    if isinstance(module, FieldInstanceNorm) and on_maps.suits(x, weight, bias, module.spread):
        return on_maps.field_instance_norm(module, tape, x)
    out = module.normalise(x, None if weight is None else weight.detach(), None if bias is None else bias.detach())
    to_bias = module.bias_gradient if isinstance(module, FieldInstanceNorm) else module.field_gradient

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        cotangent = cotangent.to(accumulate_dtype(cotangent))
        if weight is not None and weight.requires_grad:
            along = over_positions(cotangent * module.normalise(saved[0].to(cotangent.dtype), None, None))
            yield weight, Dense(over_views(module.field_gradient(along), views))
        if bias is not None and bias.requires_grad:
            yield bias, Dense(over_views(to_bias(over_positions(cotangent)), views))

    return tape.tap(out, (x,), (weight, bias), pieces)


@rule(NormNonlinearity)
def norm_nonlinearity(module: NormNonlinearity, tape: Tape, x: Tensor) -> Tensor:
    bias = module.bias
    if bias is None:
        return module.scaled(x, None)
    fixed = bias.detach()

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(over_views(module.bias_gradient(saved[0], cotangent, fixed), views))

    return tape.tap(module.scaled(x, fixed), (x,), (bias,), pieces)
