"""Nonlinearities that commute with the group: pointwise, norm, gated and Fourier."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from erlangen.equivariant.fields import FieldType, fields, trivial_fields
from erlangen.equivariant.groups import Group
from erlangen.equivariant.module import EquivariantModule, require_permutation
from erlangen.equivariant.plain import Gate, NormGate, above_zero, fourier, members
from erlangen.equivariant.representations import fourier_matrix, spectral
from erlangen.gradients.precision import accumulate_dtype


class Pointwise(EquivariantModule):
    """The same function on every channel; fields must be permutation representations."""

    def __init__(self, field_type: FieldType, function: nn.Module) -> None:
        super().__init__(field_type, field_type)
        require_permutation(field_type, "Pointwise")
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def export(self) -> nn.Module:
        return copy.deepcopy(self.function)


class NormNonlinearity(EquivariantModule):
    """Scale each field by f(‖x‖ + b)/‖x‖, f = ReLU or sigmoid times the norm; any orthogonal representation.

    Parameter: ``bias`` [fields], added to the norms.
    """

    bias: nn.Parameter | None
    field_of: Tensor

    def __init__(self, field_type: FieldType, function: str = "relu", *, bias: bool = True, eps: float = 1e-10) -> None:
        super().__init__(field_type, field_type)
        if function not in ("relu", "sigmoid"):
            raise ValueError(f"unknown norm nonlinearity {function!r}; use 'relu' or 'sigmoid'")
        self.function, self.eps = function, eps
        self.register_constant("field_of", field_type.field_of_channel)
        self.bias = nn.Parameter(torch.zeros(len(field_type))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.bias)

    def scaled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The nonlinearity with a given bias per field, or with none; norms are float32 at least."""
        wide = x.to(accumulate_dtype(x))
        norms = field_norms(wide, self.field_of, len(self.in_type), above_zero(self.eps, x))
        shifted = norms if bias is None else norms + bias.view(-1, *(1,) * (x.dim() - 2))
        scale = torch.relu(shifted) / norms if self.function == "relu" else torch.sigmoid(shifted)
        return (wide * scale.index_select(1, self.field_of)).to(x.dtype)

    def bias_gradient(self, x: Tensor, gradient: Tensor, bias: Tensor) -> Tensor:
        """Gradients w.r.t. ``bias`` of each row, [batch, fields]: ∂scale/∂b·⟨gradient, x⟩ per field, over space."""
        eps = above_zero(self.eps, x)
        x, gradient = x.to(accumulate_dtype(x)), gradient.to(accumulate_dtype(x))
        norms = field_norms(x, self.field_of, len(self.in_type), eps)
        shifted = norms + bias.view(-1, *(1,) * (x.dim() - 2))
        gate = torch.sigmoid(shifted)
        slope = (shifted > 0).to(x.dtype) / norms if self.function == "relu" else gate * (1 - gate)
        along = torch.zeros_like(norms).index_add(1, self.field_of, gradient * x) * slope
        return along.flatten(2).sum(2) if x.dim() > 2 else along

    @torch.no_grad()
    def export(self) -> nn.Module:
        """The same on feature maps by 1×1 convolutions; the bias becomes a constant."""
        bias = self.like.new_zeros(len(self.in_type)) if self.bias is None else self.bias.clone()
        belongs = members(self.field_of, len(self.in_type), bias)
        return NormGate(belongs, bias, self.eps, self.function == "relu").train(self.training)

    def init_std(self) -> dict[str, Tensor]:
        return {name: torch.ones_like(parameter) for name, parameter in self.named_parameters()}

    paper_metric = init_std


def field_norms(x: Tensor, field_of: Tensor, count: int, eps: float) -> Tensor:
    """√(‖x_f‖² + ε) of each field, [batch, fields, …]."""
    squares = x.new_zeros(x.shape[0], count, *x.shape[2:]).index_add(1, field_of, x.square())
    return (squares + above_zero(eps, x)).sqrt()


class GatedNonlinearity(EquivariantModule):
    """Each field times the sigmoid of its own scalar gate; the gates are trivial fields after the fields themselves."""

    field_of: Tensor

    def __init__(self, field_type: FieldType) -> None:
        gates = trivial_fields(field_type.group, len(field_type))
        super().__init__(field_type + gates, field_type)
        self.register_constant("field_of", field_type.field_of_channel)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = x.split([self.out_type.size, len(self.out_type)], dim=1)
        return values * torch.sigmoid(gates).index_select(1, self.field_of)

    def export(self) -> nn.Module:
        return Gate(members(self.field_of, len(self.out_type), self.like)).train(self.training)


class FourierNonlinearity(EquivariantModule):
    """Transform each band-limited field to samples on the group, apply a function, and transform back.

    Exactly equivariant to rotations by multiples of 2π/``rotations`` (and reflections); to other angles up to the
    aliasing of the function's harmonics, which falls as ``rotations`` grows. Samples of a field whose coefficients
    have unit variance have unit variance.
    """

    samples: Tensor

    def __init__(
        self, group: Group, frequency: int, count: int, function: nn.Module, rotations: int | None = None
    ) -> None:
        field_type = fields(spectral(group, frequency), count)
        super().__init__(field_type, field_type)
        self.function = function
        self.rotations = rotations if rotations is not None else 4 * (frequency + 1)
        matrix = fourier_matrix(group, frequency, self.rotations)
        self.register_constant("samples", matrix)
        self.gain = math.sqrt(matrix.shape[0] / matrix.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(1, (len(self.in_type), -1))
        values = self.function(torch.einsum("gd,nfd...->nfg...", self.samples * self.gain, split))
        return torch.einsum("gd,nfg...->nfd...", self.samples / self.gain, values).flatten(1, 2)

    def export(self) -> nn.Module:
        """Two grouped 1×1 convolutions around the function."""
        function = copy.deepcopy(self.function)
        return fourier(self.samples, self.gain, len(self.in_type), function).train(self.training)
