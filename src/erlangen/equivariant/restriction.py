"""From a group to a subgroup, and from any field to its irreducible parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.groups import Group
from erlangen.equivariant.module import EquivariantModule
from erlangen.equivariant.plain import permutation_conv, pointwise_conv
from erlangen.equivariant.representations import Representation, irrep, regular, restrict, trivial


class _Reordered(torch.autograd.Function):
    """Channels in another order, and cotangents in the inverse one.

    Autograd does not know that an index is a permutation: it would add the cotangents up one by one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        if x.device.type == "cuda" and x.dim() == 4:  # channels lie side by side there, and shall stay so
            return x.permute(0, 2, 3, 1).index_select(3, order).permute(0, 3, 1, 2)
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Reordered.apply(cotangents[0], inverse, order), None, None


class Restrict(EquivariantModule):
    """The same feature map, seen as fields of a subgroup.

    A regular field of G becomes |G|/|H| regular fields of H, one for each right coset Ht, by a permutation of its
    channels. Under the trivial group every channel becomes a scalar. Other fields keep their channels.
    """

    order: Tensor
    inverse: Tensor

    def __init__(self, in_type: FieldType, subgroup: Group) -> None:
        representations: list[Representation] = []
        order: list[int] = []
        for start, rho in zip(in_type.starts, in_type.representations):
            parts, channels = _restrict_field(rho, subgroup)
            representations += parts
            order += [int(start) + int(c) for c in channels]
        super().__init__(in_type, FieldType(subgroup, tuple(representations)))
        self.register_constant("order", np.array(order))
        self.register_constant("inverse", np.argsort(order))

    def forward(self, x: Tensor) -> Tensor:
        return _Reordered.apply(x, self.order, self.inverse)

    def export(self) -> nn.Module:
        return permutation_conv(self.order, self.like)


def _restrict_field(rho: Representation, subgroup: Group) -> tuple[list[Representation], np.ndarray]:
    """The subgroup's fields and the channels of ``rho`` that they are made of."""
    if subgroup == Group(1, False):
        return [trivial(subgroup)] * rho.size, np.arange(rho.size)
    if rho.group.is_finite and rho == regular(rho.group):
        table, inside = rho.group.table, rho.group.subgroup_index(subgroup)
        cosets: list[np.ndarray] = []
        for t in range(rho.group.order):
            members = table[inside, t]
            if t == members.min():
                cosets.append(members)
        return [regular(subgroup)] * len(cosets), np.concatenate(cosets)
    return [restrict(rho, subgroup)], np.arange(rho.size)


class Disentangle(EquivariantModule):
    """Each field in the basis of its irreps, x → Qᵀx: the output has one field per irrep, with the same norm."""

    matrix: Tensor

    def __init__(self, in_type: FieldType) -> None:
        parts = [irrep(psi.group, psi.frequency, psi.parity) for rho in in_type.representations for psi in rho.irreps]
        super().__init__(in_type, FieldType(in_type.group, tuple(parts)))
        matrix = np.zeros((in_type.size, in_type.size))
        for start, rho in zip(in_type.starts, in_type.representations):
            matrix[start : start + rho.size, start : start + rho.size] = rho.change_of_basis.T
        self.register_constant("matrix", matrix[..., None, None])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.matrix)

    def export(self) -> nn.Module:
        return pointwise_conv(self.matrix[..., 0, 0])
