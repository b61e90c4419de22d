"""One example of every layer type that has a per-sample rule, and of every Lipschitz layer.

A type that is registered but has no example here is reported as not audited, so that none escapes. A layer class may bring its
own: a class attribute ``audit_example`` that holds an `Example`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.audit.layers import Example

#: packages whose import registers rules
REGISTER = ("erlangen.circulant", "erlangen.equivariant")


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))


def _tokens(rows: int) -> Tensor:
    return torch.randint(0, 7, (rows, 4), generator=torch.Generator().manual_seed(1))


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class _Outputs(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def _constant_norm() -> nn.Module:
    from erlangen.gradients.constant_norm import ConstantNorm

    norm = nn.BatchNorm2d(3)
    norm(2 * _floats(3, 4, 4)(8) + 1)
    return ConstantNorm(norm)


class _Field:
    """A tensor with a type, as packages of equivariant layers hand it on."""

    def __init__(self, tensor: Tensor, kind: Any = None) -> None:
        self.tensor, self.type = tensor, kind


class _ExpandedConvolution(nn.Module):
    """What the rule for escnn's R2Conv sees of one: a kernel that is computed from parameters, and how it is moved."""

    __module__, __qualname__ = "escnn.nn.modules.conv.r2convolution", "R2Conv"

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.bias = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3))
        self.register_buffer("basis", torch.randn(7, 3, 2, 3, 3, generator=torch.Generator().manual_seed(3)))
        self.padding, self.stride, self.dilation, self.groups = 1, 2, 1, 1
        self.padding_mode, self.out_type = "zeros", None

    def expand_parameters(self) -> tuple[Tensor, Tensor]:
        return torch.einsum("k,kocij->ocij", self.weights, self.basis), 2.0 * self.bias

    def forward(self, input: _Field) -> _Field:
        return _Field(nn.functional.conv2d(input.tensor, *self.expand_parameters(), self.stride, self.padding))


class _Unpacked(nn.Module):
    """Plain tensors in and out of a layer of fields."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(_Field(x)).tensor


def named_examples() -> dict[str, Example]:
    """By the path under which a rule is registered: stand-ins, because the packages need not be installed."""
    return {
        "escnn.nn.modules.conv.r2convolution.R2Conv": Example(
            lambda: _Unpacked(_ExpandedConvolution()), _floats(2, 6, 5)
        ),
    }


class _NoRule(nn.Module):
    """No rule knows this layer: it goes through the functional fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.scale).tanh() + self.shift * x[:, None].square().clamp(max=1e6)


class _UsedTwice(nn.Module):
    """One weight in two places: its gradient is the sum, before any norm is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


def _band_limited() -> nn.Module:
    """Layers of fields of SO(2), which have kernels of their own on a GPU."""
    from erlangen import equivariant as eq

    fields = eq.fields(eq.spectral(eq.so2(), 2), 2)
    act = eq.FourierNonlinearity(eq.so2(), 2, 2, nn.Mish())
    inside = (act, eq.FieldInstanceNorm(fields), eq.SpatialAvgPool(fields, 2))
    return nn.Sequential(nn.Conv2d(3, fields.size, 3, padding=1), *inside, nn.Conv2d(fields.size, 4, 1))


def combinations_of_layers() -> dict[str, Example]:
    """What no single rule is: runs that become one kernel on a GPU, computed and shared weights, layers without a rule."""
    from erlangen import equivariant as eq

    fields = eq.regular_fields(eq.cyclic(4), 4)
    layers = lambda *middle: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *middle, nn.Conv2d(16, 4, 1))  # noqa: E731
    return {
        "Mish, GroupNorm, pool": Example(
            lambda: layers(nn.Mish(), nn.GroupNorm(2, 16), nn.MaxPool2d(2)), _floats(3, 8, 8)
        ),
        "GroupNorm, ReLU": Example(lambda: layers(nn.GroupNorm(4, 16), nn.ReLU()), _floats(3, 8, 8)),
        "EquivariantGroupNorm, Mish": Example(
            lambda: layers(eq.EquivariantGroupNorm(fields), nn.Mish()), _floats(3, 8, 8)
        ),
        "FourierNonlinearity, FieldInstanceNorm, pool": Example(_band_limited, _floats(3, 4, 4)),
        "a layer without a rule": Example(_NoRule, _floats(5)),
        "a weight used twice": Example(_UsedTwice, _floats(5)),
        "a computed weight": Example(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), _floats(4, 5)),
    }


def examples() -> dict[type[nn.Module], Example]:
    """By registered type."""
    from erlangen import equivariant as eq
    from erlangen.circulant import CirculantConv2d, CirculantLinear
    from erlangen.gradients.constant_norm import ConstantNorm
    from erlangen.models.standardised import StandardisedConv2d

    fields = eq.regular_fields(eq.cyclic(4), 2)
    vectors = eq.fields(eq.irrep(eq.so2(), 1), 2)
    return {
        nn.Linear: Example(lambda: nn.Linear(5, 3), _floats(4, 5)),
        nn.MultiheadAttention: Example(_SelfAttention, _floats(4, 8)),
        nn.Conv1d: Example(lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), _floats(3, 9)),
        nn.Conv2d: Example(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), _floats(4, 6, 5)),
        nn.Conv3d: Example(lambda: nn.Conv3d(2, 3, 2, padding=1), _floats(2, 4, 4, 3)),
        nn.ConvTranspose1d: Example(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), _floats(3, 5)),
        nn.ConvTranspose2d: Example(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), _floats(4, 4, 5)),
        nn.ConvTranspose3d: Example(lambda: nn.ConvTranspose3d(2, 3, 2), _floats(2, 3, 3, 3)),
        nn.Embedding: Example(lambda: nn.Embedding(7, 3, padding_idx=2), _tokens),
        nn.EmbeddingBag: Example(lambda: nn.EmbeddingBag(7, 3, padding_idx=2), _tokens),
        nn.GroupNorm: Example(lambda: nn.GroupNorm(2, 6), _floats(6, 3, 4)),
        nn.InstanceNorm1d: Example(lambda: nn.InstanceNorm1d(3, affine=True), _floats(3, 6)),
        nn.InstanceNorm2d: Example(lambda: nn.InstanceNorm2d(3, affine=True), _floats(3, 4, 4)),
        nn.InstanceNorm3d: Example(lambda: nn.InstanceNorm3d(3, affine=True), _floats(3, 4, 2, 2)),
        ConstantNorm: Example(_constant_norm, _floats(3, 4, 4)),
        nn.LayerNorm: Example(lambda: nn.LayerNorm(6), _floats(3, 6)),
        nn.RMSNorm: Example(lambda: nn.RMSNorm(6), _floats(3, 6)),
        nn.RNN: Example(lambda: _Outputs(nn.RNN(4, 3, batch_first=True)), _floats(5, 4)),
        nn.LSTM: Example(lambda: _Outputs(nn.LSTM(4, 3, batch_first=True, bidirectional=True)), _floats(5, 4)),
        nn.GRU: Example(lambda: _Outputs(nn.GRU(4, 3, batch_first=True)), _floats(5, 4)),
        CirculantLinear: Example(lambda: CirculantLinear(6, 5, 3), _floats(4, 6)),
        CirculantConv2d: Example(lambda: CirculantConv2d(4, 4, 3, 2, padding=1), _floats(4, 5, 5)),
        StandardisedConv2d: Example(lambda: StandardisedConv2d(4, 6, 3, stride=2, padding=1), _floats(4, 5, 6)),
        eq.SteerableConv2d: Example(
            lambda: eq.SteerableConv2d(fields, fields, 3, padding=1), _floats(fields.size, 6, 6)
        ),
        eq.EquivariantGroupNorm: Example(lambda: eq.EquivariantGroupNorm(fields), _floats(fields.size, 4, 4)),
        eq.FieldInstanceNorm: Example(lambda: eq.FieldInstanceNorm(vectors), _floats(vectors.size, 4, 4)),
        eq.NormNonlinearity: Example(lambda: eq.NormNonlinearity(vectors), _floats(vectors.size, 4, 4)),
    }


def layer_examples() -> dict[type[nn.Module] | str, Example | None]:
    """Every registered type, and every path of a type, with its example, or None where there is none."""
    for package in REGISTER:
        importlib.import_module(package)
    from erlangen.gradients import registered
    from erlangen.gradients.registry import registered_by_name

    known, named = examples(), named_examples()
    found: dict[type[nn.Module] | str, Example | None] = {
        kind: known.get(kind, getattr(kind, "audit_example", None)) for kind in registered()
    }
    return found | {path: named.get(path, _brought(path)) for path in registered_by_name()}


def _brought(path: str) -> Example | None:
    """The example that a layer of an installed package brings itself."""
    package, _, name = path.rpartition(".")
    try:
        return getattr(getattr(importlib.import_module(package), name, None), "audit_example", None)
    except ImportError:
        return None


def bounded_examples() -> dict[type[nn.Module], tuple[Any, tuple[int, ...]] | None]:
    """Every Lipschitz layer with parameters: (layer, input shape), or None where there is no example."""
    from erlangen import lipschitz as lip
    from erlangen.lipschitz.base import LipschitzLayer

    image, flat = (2, 6, 6), (5,)
    known: dict[type[nn.Module], tuple[Callable[[], Any], tuple[int, ...]]] = {
        lip.SpectralDense: (lambda: lip.SpectralDense(5, 4, bias=True), (3, 5)),
        lip.FrobeniusDense: (lambda: lip.FrobeniusDense(5, 4, bias=True), flat),
        lip.OrthogonalDense: (lambda: lip.OrthogonalDense(5, 4), flat),
        lip.SpectralConv2d: (lambda: lip.SpectralConv2d(2, 3, 3, bias=True), image),
        lip.OrthogonalConv2d: (lambda: lip.OrthogonalConv2d(2, 3, 3), image),
        lip.Bias: (lambda: lip.Bias(2), image),
        lip.AvgPool2d: (lambda: lip.AvgPool2d(3, 2), image),
        lip.MaxPool2d: (lambda: lip.MaxPool2d(3, 2), image),
        lip.L2NormPool2d: (lambda: lip.L2NormPool2d(2), image),
        lip.GlobalAvgPool: (lambda: lip.GlobalAvgPool(), image),
        lip.TokenMean: (lambda: lip.TokenMean(), (4, 5)),
        lip.MaxMin: (lambda: lip.MaxMin(), image),
        lip.GroupSort: (lambda: lip.GroupSort(2), image),
        lip.FullSort: (lambda: lip.FullSort(), flat),
        lip.ReLU: (lambda: lip.ReLU(), image),
        lip.Householder: (lambda: lip.Householder(4), (4,)),
        lip.Flatten: (lambda: lip.Flatten(), image),
        lip.Permute: (lambda: lip.Permute(2, 1), (4, 5)),
        lip.Tokens: (lambda: lip.Tokens(), image),
        lip.InvertibleDownsampling: (lambda: lip.InvertibleDownsampling(2), image),
        lip.LayerCentering: (lambda: lip.LayerCentering(), flat),
        lip.Residual: (lambda: lip.Residual(lip.SpectralDense(5, 5)), flat),
        lip.BackwardClip: (lambda: lip.BackwardClip(0.5), flat),
    }
    abstract = {LipschitzLayer, lip.Constrained, lip.Sequential, lip.BoundedInput, lip.AdaptiveBackwardClip}
    out: dict[type[nn.Module], tuple[Any, tuple[int, ...]] | None] = {}
    stack = [LipschitzLayer]
    while stack:
        kind = stack.pop()
        stack.extend(kind.__subclasses__())
        ours = kind.__module__.startswith("erlangen.") and not kind.__module__.startswith("erlangen.audit.")
        if kind in abstract or kind.__name__.startswith("_") or not ours:
            continue
        entry = known.get(kind)
        out[kind] = None if entry is None else (entry[0], entry[1])
    return out
