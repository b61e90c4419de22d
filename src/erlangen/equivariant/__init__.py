"""Equivariant layers for planar images: groups, representations, field types, steerable bases and layers.

Layers are ordinary ``nn.Module``s on plain tensors; each declares its ``in_type`` and ``out_type`` and can prove itself
with ``check_equivariance()``.
"""

import erlangen.gradients.rules.steerable  # noqa: F401  (registers the per-sample rules of these layers)
from erlangen.equivariant.basis import KernelBasis, pixel_basis, steerable_basis
from erlangen.equivariant.checks import EquivarianceError, EquivarianceReport, check_equivariance, transform
from erlangen.equivariant.conv import SteerableConv2d
from erlangen.equivariant.expansion import KernelExpansion
from erlangen.equivariant.fields import FieldType, fields, regular_fields, trivial_fields
from erlangen.equivariant.groups import Element, Group, cyclic, dihedral, group_by_name, o2, so2
from erlangen.equivariant.kernels import KernelGrid
from erlangen.equivariant.module import EquivariantModule, export
from erlangen.equivariant.nonlinearities import FourierNonlinearity, GatedNonlinearity, NormNonlinearity, Pointwise
from erlangen.equivariant.norms import EquivariantGroupNorm, FieldInstanceNorm
from erlangen.equivariant.pooling import FieldDropout, GroupPool, SpatialAvgPool, SpatialMaxPool
from erlangen.equivariant.representations import (
    Irrep,
    Representation,
    direct_sum,
    irrep,
    quotient,
    regular,
    restrict,
    spectral,
    trivial,
)
from erlangen.equivariant.restriction import Disentangle, Restrict
from erlangen.equivariant.sequential import EquivariantSequential

__all__ = [
    "Disentangle",
    "Element",
    "EquivarianceError",
    "EquivarianceReport",
    "EquivariantGroupNorm",
    "EquivariantModule",
    "EquivariantSequential",
    "FieldDropout",
    "FieldInstanceNorm",
    "FieldType",
    "FourierNonlinearity",
    "GatedNonlinearity",
    "Group",
    "GroupPool",
    "Irrep",
    "KernelBasis",
    "KernelExpansion",
    "KernelGrid",
    "NormNonlinearity",
    "Pointwise",
    "Representation",
    "Restrict",
    "SpatialAvgPool",
    "SpatialMaxPool",
    "SteerableConv2d",
    "check_equivariance",
    "cyclic",
    "dihedral",
    "direct_sum",
    "export",
    "fields",
    "group_by_name",
    "irrep",
    "o2",
    "pixel_basis",
    "quotient",
    "regular",
    "regular_fields",
    "restrict",
    "so2",
    "spectral",
    "steerable_basis",
    "transform",
    "trivial",
    "trivial_fields",
]
