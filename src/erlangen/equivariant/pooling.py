"""Pooling over space and over the group, and dropout of whole fields."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.fields import FieldType, trivial_fields
from erlangen.equivariant.module import EquivariantModule, bound_off_grid, require_permutation
from erlangen.equivariant.nonlinearities import field_norms
from erlangen.equivariant.plain import DropFields, FieldNorms, members, pointwise_conv
from erlangen.gradients.pooling import max_pool2d


class SpatialMaxPool(EquivariantModule):
    """Max pooling of permutation fields; exact on the grid where the windows tile the map symmetrically."""

    def __init__(self, field_type: FieldType, kernel_size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(field_type, field_type)
        require_permutation(field_type, "SpatialMaxPool")
        self.kernel_size, self.stride, self.padding = kernel_size, stride or kernel_size, padding
        self.off_grid_bound = bound_off_grid(max(self.kernel_size, self.stride))  # the largest of a window, not its mean

    def forward(self, x: Tensor) -> Tensor:
        return max_pool2d(x, self.kernel_size, self.stride, self.padding)

    def export(self) -> nn.Module:
        return nn.MaxPool2d(self.kernel_size, self.stride, self.padding)


class SpatialAvgPool(EquivariantModule):
    """Average pooling of any fields."""

    def __init__(self, field_type: FieldType, kernel_size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__(field_type, field_type)
        self.kernel_size, self.stride, self.padding = kernel_size, stride or kernel_size, padding
        self.off_grid_bound = bound_off_grid(self.stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)

    def export(self) -> nn.Module:
        return nn.AvgPool2d(self.kernel_size, self.stride, self.padding)


class GroupPool(EquivariantModule):
    """One invariant scalar per field: ``max`` or ``mean`` over a permutation field, or the ``norm`` of any field."""

    field_of: Tensor

    def __init__(self, field_type: FieldType, mode: str = "max", eps: float = 1e-10) -> None:
        super().__init__(field_type, trivial_fields(field_type.group, len(field_type)))
        if mode not in ("max", "mean", "norm"):
            raise ValueError(f"unknown group pooling {mode!r}; use 'max', 'mean' or 'norm'")
        if mode != "norm":
            require_permutation(field_type, f"GroupPool({mode!r})")
            field_type.uniform(f"GroupPool({mode!r})")
        self.mode, self.eps = mode, eps
        self.register_constant("field_of", field_type.field_of_channel)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "norm":
            return field_norms(x, self.field_of, len(self.in_type), self.eps)
        split = x.unflatten(1, (len(self.in_type), -1))
        return split.amax(2) if self.mode == "max" else split.mean(2)

    def export(self) -> nn.Module:
        if self.mode == "norm":
            return FieldNorms(members(self.field_of, len(self.in_type), self.like), self.eps)
        size = self.in_type.distinct[0].size
        if self.mode == "mean":
            return pointwise_conv(members(self.field_of, len(self.in_type), self.like) / size)
        return nn.Sequential(nn.Unflatten(1, (len(self.in_type), size)), nn.MaxPool3d((size, 1, 1)), nn.Flatten(1, 2))


class FieldDropout(EquivariantModule):
    """Drop whole fields (all their channels, everywhere) with probability ``p`` in training; the rest is scaled up."""

    field_of: Tensor

    def __init__(self, field_type: FieldType, p: float = 0.5) -> None:
        super().__init__(field_type, field_type)
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.p = p
        self.register_constant("field_of", field_type.field_of_channel)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = F.dropout(torch.ones(x.shape[0], len(self.in_type), dtype=x.dtype, device=x.device), self.p)
        return x * keep.index_select(1, self.field_of).view(*x.shape[:2], *(1,) * (x.dim() - 2))

    def export(self) -> nn.Module:
        return DropFields(members(self.field_of, len(self.in_type), self.like), self.p).train(self.training)
