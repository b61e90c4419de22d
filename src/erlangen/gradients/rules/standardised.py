"""Convolutions with standardised filters: the Jacobian of weight standardisation in closed form.

For a filter w = (v − mean v)/r of d weights, r² = ‖v − mean v‖² + ε·d, an owner's gradient w.r.t. v is a projection of
the one w.r.t. w, because w has mean zero:

    g_v = (g_w − mean g_w − w⟨w, g_w⟩)/r,    ‖g_v‖² = (‖g_w‖² − d·mean(g_w)² − (2 − ‖w‖²)⟨w, g_w⟩²)/r².

So norms and weighted sums need g_w only, contracted with two fixed vectors per filter: g_v of an owner is never formed
unless a geometry asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.kernels import conv_gradient, usable
from erlangen.gradients.kernels.moments import moments
from erlangen.gradients.pieces import (
    Dense,
    Piece,
    Weight,
    chunk_size,
    gram_is_cheaper,
    gram_norms,
    rescaled,
    unit_scale,
)
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rules.conv import Conv, Geometry, explicit_padding, tapped_convolution
from erlangen.gradients.sums import memory_order, squared_norms
from erlangen.gradients.tape import Tape
from erlangen.models.standardised import StandardisedConv2d, standardise

#: how much of ‖g_w‖² counts beside ‖g_v‖², in rounding errors. Sixteen would cover what a difference of squares loses. But
#: g_w is summed over owners before it is projected, and what the projection removes is rounded there first: a gradient of
#: mean and direction alone must not enter that sum at many times the bound. So no term of it is above 64·C in float32
MARGIN = 2048


@dataclass(frozen=True)
class Projection:
    """The adjoint of the standardisation at one v: filters w [O, …] and deviations r [O, 1, …], float32 at least."""

    filters: Tensor
    deviation: Tensor

    @property
    def size(self) -> int:
        """d, the weights of a filter."""
        return math.prod(self.filters.shape[1:])

    def pull(self, g: Tensor) -> Tensor:
        """g_w [..., O, …] → g_v"""
        inner = tuple(range(1 - self.filters.ndim, 0))
        g = g.to(torch.promote_types(g.dtype, self.filters.dtype))
        along = (g * self.filters).sum(inner, keepdim=True)
        return (g - g.mean(inner, keepdim=True) - self.filters * along).div_(self.deviation)

    def norms_squared(self, energy: Tensor, total: Tensor, along: Tensor) -> Tensor:
        """‖g_v‖² [n] from ‖g_w‖², Σg_w/√d and ⟨w, g_w⟩ of every filter, [n, O] each. A difference of squares that
        nearly cancel could come out too small: it is rounded outwards by the rounding error of its terms."""
        own = self.filters.flatten(1).square().sum(1)
        value = (energy - total.square() - (2 - own) * along.square()).clamp(min=0)
        value = value + MARGIN * torch.finfo(value.dtype).eps * energy
        return (value / self.deviation.flatten().square()).sum(1)

    def bound(self, energy: Tensor, total: Tensor) -> Tensor:
        """‖(g_w − mean g_w)/r‖² ≥ ‖g_v‖² [n] from ‖g_w‖² and Σg_w of every filter, [n, O] each. What g_w has along w is not
        taken off: it would cost a pass over memory, and is a few parts in a thousand of the norm."""
        value = torch.addcmul(energy, total, total, value=-1.0 / self.size).clamp_(min=0)
        value.add_(energy, alpha=MARGIN * torch.finfo(value.dtype).eps)
        return (value * self.deviation.flatten().square().reciprocal()).sum(1)

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor]:
        """(min r)/r of every filter, in (0, 1], and (min r)²."""
        deviation = self.deviation.flatten()
        least = deviation.min()
        return least / deviation, least.square()


class Standardised(Piece):
    """Per-owner gradients w.r.t. v; ``inner`` holds those w.r.t. w, formed or not. ``outputs`` are those of the
    convolution without bias, exact, where somebody has kept them: they save a product; ``known`` are the squared norms."""

    def __init__(
        self, inner: Piece, projection: Projection, outputs: Tensor | None = None, known: Tensor | None = None
    ) -> None:
        self.inner, self.projection, self.outputs, self.known = inner, projection, outputs, known

    @property
    def count(self) -> int:
        return self.inner.count

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return self.inner.prefers_dense

    @property
    def euclidean_only(self) -> bool:  # type: ignore[override]
        return self.inner.euclidean_only

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return self.inner.guarded

    def dense(self) -> Tensor:
        return self.projection.pull(self.inner.dense())

    def formed(self) -> Piece:
        """Keeps g_w: g_v costs more passes over memory and is not needed."""
        if isinstance(self.inner, Conv) and self.inner.has_kernel():
            g, moments = self.inner.by_kernel(conv_gradient.FILTERS)
            kept = Dense(g.unflatten(2, self.inner.geometry.kernel).movedim(-1, 2))
            return Standardised(kept, self.projection, known=self.projection.bound(*moments.unbind(1)))
        return Standardised(self.inner.formed(), self.projection)

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.sum_of_formed(w) if self.measured_formed else self.projection.pull(self.inner.weighted_sum(w))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not None:
            return super().norms_squared(weight)
        if self.known is not None:
            return self.known
        if isinstance(self.inner, Conv) and self.inner.euclidean_only:
            return self._unformed(self.inner)
        self.inner.measured_formed = not self._by_gram
        return torch.cat([part._norms() for part in self.chunks()])

    def _unformed(self, conv: Conv) -> Tensor:
        """`Projection.bound` by the kernel that forms no gradient."""
        inverse, scale = self.projection.inverse
        return conv.unformed_norms(inverse) / scale

    @property
    def _by_gram(self) -> bool:
        return isinstance(self.inner, Conv) and not self.inner.prefers_dense

    def _norms(self) -> Tensor:
        if self._by_gram:
            return self._gram(self.inner)  # type: ignore[arg-type]
        return self._formed(self.inner.dense() if isinstance(self.inner, Dense) else self.inner.precise().dense())

    def _formed(self, g: Tensor) -> Tensor:
        order = memory_order(g, 2)
        g = g.permute(0, 1, *order).flatten(2)
        filters = self.projection.filters.permute(0, *[axis - 1 for axis in order]).flatten(1)
        if usable(g) and g.dtype != torch.float64:
            energy, total, along = moments(g.contiguous(), filters)
            return self.projection.norms_squared(energy, total / math.sqrt(g.shape[2]), along)
        g, filters = g.to(accumulate_dtype(g)), filters.to(accumulate_dtype(g))
        energy = squared_norms(g.flatten(0, 1)).unflatten(0, g.shape[:2])
        along = torch.bmm(g.transpose(0, 1), filters[..., None]).squeeze(-1).t()
        return self.projection.norms_squared(energy, g.sum(2) / math.sqrt(g.shape[2]), along)

    def _gram(self, conv: Conv) -> Tensor:
        """Norms without g_w: its mean is gone when the input windows are centred, and ⟨w, g_w⟩ = ⟨output, cotangent⟩."""
        (x, size_x), (d, size_d) = unit_scale(conv.x, conv.count), unit_scale(conv.d, conv.count)
        filters = self.projection.filters.to(d.dtype)
        d = d / self.projection.deviation.to(d.dtype).view(-1, *[1] * (d.ndim - 2))
        outputs = self._outputs(x, size_x, filters, conv)
        along = (outputs * d).flatten(2).sum(2).unflatten(0, (conv.count, conv.views)).sum(1)
        a, d = Conv(x, d, conv.views, conv.shape, conv.geometry).windows()
        mean, per_owner = a.mean(2, keepdim=True), (conv.count, conv.geometry.groups)
        norms = gram_norms(a - mean, d).view(per_owner).sum(1)
        gone = gram_norms(mean * math.sqrt(a.shape[2]), d).view(per_owner).sum(1)  # g_w's mean
        lost = ((2 - filters.flatten(1).square().sum(1)) * along.square()).sum(1)
        value = (norms - lost).clamp(min=0) + MARGIN * torch.finfo(norms.dtype).eps * (norms + gone)
        return rescaled(value, size_x, size_d)

    def _outputs(self, x: Tensor, size: Tensor, filters: Tensor, conv: Conv) -> Tensor:
        if self.outputs is not None:
            return self.outputs / size.repeat_interleave(conv.views).view(-1, *[1] * (x.ndim - 1))
        g = conv.geometry
        return F.conv2d(x, filters, None, g.stride, g.padding, g.dilation, g.groups)

    def precise(self) -> Piece:
        return Standardised(self.inner.precise(), self.projection)

    def chunks(self) -> list[Standardised]:  # type: ignore[override]
        if isinstance(self.inner, Dense):
            g = self.inner.g
            parts: list[Piece] = [Dense(part) for part in g.split(chunk_size(math.prod(g.shape[1:]), g))]
        else:
            parts = list(self.inner.chunks())
        outputs: Sequence[Tensor | None] = [None] * len(parts)
        if self.outputs is not None and self.count:
            rows = len(self.outputs) // self.count
            outputs = self.outputs.split([rows * part.count for part in parts])
        return [Standardised(part, self.projection, y) for part, y in zip(parts, outputs, strict=True)]

    def zero(self, bad: Tensor) -> Piece:
        return Standardised(self.inner.without(bad), self.projection)


@rule(StandardisedConv2d)
def standardised_convolution(module: StandardisedConv2d, tape: Tape, input: Tensor) -> Tensor:
    x, padding = explicit_padding(module, input)
    geometry = Geometry(module.kernel_size, module.stride, padding, module.dilation, module.groups)
    projection = _projection(module, tape, x)
    kept: list[Tensor | None] = []
    through = lambda piece: Standardised(piece, projection, kept[0])  # noqa: E731
    filters = projection.filters.to(module.weight.dtype)
    out = tapped_convolution(tape, x, filters, module.bias, geometry, module.weight, through)
    kept.append(_exact_outputs(out, module))
    return out


#: beside the modules, not in them: copies and pickles of a module stay ordinary
_KNOWN: WeakKeyDictionary[StandardisedConv2d, tuple[Any, ref[Tape], Projection]] = WeakKeyDictionary()


@torch.no_grad()
def _projection(module: StandardisedConv2d, tape: Tape, x: Tensor) -> Projection:
    """The filters of a layer. On a GPU the physical parts of a logical batch share them; no other batch may have them,
    because parameters that were written to behind autograd's back (``p.data``) keep their version."""
    weight = module.weight
    key = weight.data_ptr(), weight._version, weight.dtype, module.eps, tape.logical
    known = _KNOWN.get(module)
    if known is not None and known[0] == key and known[1]() is tape:
        return known[2]
    with torch.autocast(weight.device.type, enabled=False):
        projection = Projection(*standardise(weight.to(accumulate_dtype(weight)), module.eps))
    if usable(x, weight):
        _KNOWN[module] = (key, ref(tape), projection)
    return projection


def _exact_outputs(out: Tensor, module: StandardisedConv2d) -> Tensor | None:
    """A copy of the output without bias, where positions are so few that norms will come from Gram matrices. Not on a
    GPU, where a convolution may have used TF32."""
    shape = module.weight.shape
    few = gram_is_cheaper(math.prod(out.shape[2:]), math.prod(shape[1:]), shape[0] // module.groups, out)
    if out.is_cuda or out.dtype != accumulate_dtype(out) or not few:
        return None
    out = out.detach()
    return out.clone() if module.bias is None else out - module.bias.detach().view(-1, *[1] * (out.ndim - 2))


__all__ = ["Projection", "Standardised", "standardised_convolution"]
