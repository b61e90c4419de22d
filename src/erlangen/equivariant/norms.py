"""Normalisations with per-sample statistics that commute with the group: the two of private equivariant training."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.module import EquivariantModule, require_permutation
from erlangen.equivariant.plain import FieldNorm, members, permutation_conv
from erlangen.gradients.precision import accumulate_dtype


class EquivariantGroupNorm(EquivariantModule):
    """Group normalisation of permutation fields (regular, trivial, quotient), ``groups`` groups of fields.

    Statistics are pooled over the fields of a group, the elements of each field and space; with ``per_element=True``
    each group element has statistics of its own. ``groups=None`` gives every field its own group.

    Parameters, and how they act: ``weight`` [fields] and ``bias`` [fields], shared by the d channels of a field:
    the dense scale and shift are ``weight.repeat_interleave(d)`` and ``bias.repeat_interleave(d)``, so a gradient
    w.r.t. the dense ones is summed over each field (:meth:`field_gradient`).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        field_type: FieldType,
        groups: int | None = None,
        *,
        per_element: bool = False,
        affine: bool = True,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(field_type, field_type)
        require_permutation(field_type, "EquivariantGroupNorm")
        self.field_size = field_type.uniform("EquivariantGroupNorm").size
        self.groups = len(field_type) if groups is None else groups
        if len(field_type) % self.groups:
            raise ValueError(f"{len(field_type)} fields do not divide into {self.groups} groups; choose a divisor")
        self.per_element, self.eps = per_element, eps
        self.weight = nn.Parameter(torch.ones(len(field_type))) if affine else None
        self.bias = nn.Parameter(torch.zeros(len(field_type))) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm with a given scale and shift per field, or with none."""
        weight, bias = self.per_channel(weight), self.per_channel(bias)
        if not self.per_element:
            return F.group_norm(x, self.groups, weight, bias, self.eps)
        shape = x.shape
        split = x.view(shape[0], self.groups, len(self.in_type) // self.groups, self.field_size, *shape[2:]).transpose(2, 3)
        normal = F.group_norm(split.reshape(shape), self.groups * self.field_size, eps=self.eps)
        normal = normal.view(split.shape).transpose(2, 3).reshape(shape)
        if weight is None or bias is None:
            return normal
        extra = (1,) * (x.dim() - 2)
        return normal * weight.view(-1, *extra) + bias.view(-1, *extra)

    def per_channel(self, values: Tensor | None) -> Tensor | None:
        """[..., fields] → [..., channels]"""
        return None if values is None else values.repeat_interleave(self.field_size, -1)

    def dense_affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Scale and shift of every channel."""
        return self.per_channel(self.weight), self.per_channel(self.bias)

    def field_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients w.r.t. ``weight`` or ``bias`` [..., fields] from those w.r.t. the dense ones [..., channels]."""
        return gradient.unflatten(-1, (-1, self.field_size)).sum(-1)

    def init_std(self) -> dict[str, Tensor]:
        return {name: torch.ones_like(parameter) for name, parameter in self.named_parameters()}

    paper_metric = init_std

    @torch.no_grad()
    def export(self) -> nn.Module:
        """An ``nn.GroupNorm``; per-element statistics need the channels sorted by element before, and back after."""
        channels = self.in_type.size
        groups = self.groups * (self.field_size if self.per_element else 1)
        norm = nn.GroupNorm(groups, channels, self.eps, affine=self.weight is not None)
        order = torch.arange(channels, device=self.like.device)
        if self.per_element:
            order = order.view(self.groups, -1, self.field_size).transpose(1, 2).reshape(-1)
        weight, bias = self.dense_affine()
        if weight is not None and bias is not None:
            norm.to(weight)
            norm.weight.copy_(weight[order])
            norm.bias.copy_(bias[order])
        if not self.per_element:
            return norm.train(self.training)
        there, back = (permutation_conv(o, self.like) for o in (order, order.argsort()))
        return nn.Sequential(there, norm, back).train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_type}, groups={self.groups}, per_element={self.per_element}, eps={self.eps}"


class FieldInstanceNorm(EquivariantModule):
    """i.i.d. instance normalisation of any fields: per sample and field, over space.

    Under the group only trivial irreps have a mean, and the covariance of an irreducible field is λ·1 with
    λ = E‖y‖²/d (Eqs. 5–7 of Hölzl et al., 2023). So the spatial mean is removed from the trivial irreps only, and the
    field is divided by √(λ + ε). Gradients flow through both statistics; nothing is shared between samples.

    Parameters, and how they act: ``weight`` [fields] scales each field; ``bias`` [number of trivial irreps] is added
    along the invariant vectors.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    invariants: Tensor
    spread: Tensor
    sizes: Tensor
    field_of: Tensor

    def __init__(self, field_type: FieldType, *, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__(field_type, field_type)
        self.eps = eps
        field_of = field_type.field_of_channel
        sizes = np.array([rho.size for rho in field_type.representations])
        self.register_constant("invariants", field_type.invariants())
        self.register_constant("field_of", field_of)
        # [channels, fields]: mean over the components of each field
        self.register_constant("spread", np.eye(len(field_type))[field_of] / sizes)
        self.register_constant("sizes", sizes.astype(np.float64))
        self.weight = nn.Parameter(torch.ones(len(field_type))) if affine else None
        self.bias = nn.Parameter(torch.zeros(self.invariants.shape[1])) if affine and self.invariants.shape[1] else None

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm with a given scale per field and shift per invariant, or with none; statistics are float32 at least."""
        wide = x.to(accumulate_dtype(x))
        flat = wide.flatten(2) if x.dim() > 2 else wide.unsqueeze(-1)
        with torch.autocast(x.device.type, enabled=False):
            invariants = self.invariants.to(wide.dtype)
            mean = flat.mean(-1) @ invariants @ invariants.T
            centred = flat - mean.unsqueeze(-1)
            variance = centred.square().mean(-1) @ self.spread.to(wide.dtype)
            scale = torch.rsqrt(variance + self.eps)
            if weight is not None:
                scale = scale * weight
            out = centred * self.to_channels(scale).unsqueeze(-1)
            if bias is not None:
                out = out + (invariants @ bias.to(wide.dtype)).unsqueeze(-1)
        return out.view(x.shape).to(x.dtype)

    def to_channels(self, values: Tensor) -> Tensor:
        """[..., fields] → [..., channels]"""
        return values.index_select(-1, self.field_of)

    def field_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients w.r.t. ``weight`` [..., fields] from those w.r.t. a scale per channel [..., channels]."""
        total = gradient.new_zeros(*gradient.shape[:-1], len(self.in_type))
        return total.index_add(-1, self.field_of, gradient)

    @torch.no_grad()
    def export(self) -> nn.Module:
        """The same norm of feature maps by means and 1×1 convolutions; affine parameters become constants."""
        scale = members(self.field_of, len(self.in_type), self.spread).T
        scale = scale if self.weight is None else scale * self.weight
        bias = self.spread.new_zeros(len(self.spread)) if self.bias is None else self.invariants @ self.bias
        return FieldNorm(self.invariants, self.spread, scale, bias, self.eps).train(self.training)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Gradients w.r.t. ``bias`` from those w.r.t. a shift per channel [..., channels]."""
        return gradient @ self.invariants.to(gradient.dtype)

    def init_std(self) -> dict[str, Tensor]:
        return {name: torch.ones_like(parameter) for name, parameter in self.named_parameters()}

    paper_metric = init_std
