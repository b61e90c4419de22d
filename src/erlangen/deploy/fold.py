"""From our layers to plain torch: kernels expanded, circulant blocks written out, constraints and tapes left behind.

`fold` replaces layers; `plain` also dissolves our containers, so that what remains is a graph of ``torch.nn`` layers
and torch functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from erlangen import lipschitz
from erlangen.circulant import CirculantConv2d, CirculantLinear
from erlangen.deploy import plain_layers as plain_forms
from erlangen.equivariant import (
    Disentangle,
    EquivariantGroupNorm,
    FieldDropout,
    FieldInstanceNorm,
    FourierNonlinearity,
    GatedNonlinearity,
    GroupPool,
    NormNonlinearity,
    Pointwise,
    Restrict,
    SpatialAvgPool,
    SpatialMaxPool,
    SteerableConv2d,
)
from erlangen.gradients.constant_norm import ConstantNorm
from erlangen.lipschitz.backward_clip import BackwardClip
from erlangen.models.small import _Shrink
from erlangen.models.standardised import StandardisedConv2d


class ExportError(ValueError):
    """The model has no plain form; the message names the layer."""


def _conv(layer: nn.Conv2d) -> nn.Module:
    new = nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,  # type: ignore[arg-type]
        layer.groups, layer.bias is not None, layer.padding_mode,  # type: ignore[arg-type]
    )  # fmt: skip
    weight = layer.filters() if isinstance(layer, StandardisedConv2d) else layer.weight
    return _filled(new, weight, layer.bias)


def _linear(layer: nn.Linear) -> nn.Module:
    return _filled(nn.Linear(layer.in_features, layer.out_features, layer.bias is not None), layer.weight, layer.bias)


def _filled(new: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    with torch.no_grad():
        new.to(weight)
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    return new


def _export(layer: Any) -> nn.Module:
    return layer.export()


#: our layer → a plain one with the same outputs; the first type that fits is taken
_PLAIN: tuple[tuple[type[nn.Module], Callable[[Any], nn.Module]], ...] = (
    (SteerableConv2d, _export),
    (EquivariantGroupNorm, _export),
    (SpatialMaxPool, _export),
    (SpatialAvgPool, _export),
    (Restrict, _export),
    (Disentangle, _export),
    (Pointwise, _export),
    (GroupPool, _export),
    (FieldInstanceNorm, _export),
    (FourierNonlinearity, _export),
    (NormNonlinearity, _export),
    (GatedNonlinearity, _export),
    (ConstantNorm, _export),
    (FieldDropout, lambda layer: nn.Identity()),
    (CirculantLinear, lambda layer: layer.to_dense()),
    (CirculantConv2d, lambda layer: layer.to_dense()),
    (StandardisedConv2d, _conv),
    (lipschitz.BoundedInput, plain_forms.Ball),
    (lipschitz.ReLU, lambda layer: nn.ReLU()),
    (lipschitz.Flatten, lambda layer: nn.Flatten()),
    (lipschitz.InvertibleDownsampling, lambda layer: nn.PixelUnshuffle(layer.factor)),
    (lipschitz.L2NormPool2d, plain_forms.L2Pool),
    (lipschitz.MaxPool2d, lambda layer: nn.MaxPool2d(layer.kernel, layer.stride)),
    (lipschitz.LayerCentering, plain_forms.Centred),
    (lipschitz.Bias, plain_forms.AddBias),
    (lipschitz.GroupSort, plain_forms.Sorted),
    (lipschitz.Householder, plain_forms.Reflect),
    (BackwardClip, lambda layer: nn.Identity()),
    (_Shrink, lambda layer: nn.AdaptiveAvgPool2d(layer.size)),
)


def fold(model: nn.Module) -> nn.Module:
    """A copy in which every layer of ours has become a plain one with the same outputs, ready to predict."""
    return _folded(copy.deepcopy(model).eval()).eval()


def _folded(module: nn.Module) -> nn.Module:
    for kind, make in _PLAIN:
        if isinstance(module, kind):
            return make(module)
    if isinstance(module, (lipschitz.GlobalAvgPool, lipschitz.TokenMean)) and module.scaled:
        return plain_forms.ScaledMean(isinstance(module, lipschitz.TokenMean))
    # parametrizations are not removed but read: removing them from a copy would break the original, whose class it shares
    if parametrize.is_parametrized(module) or isinstance(module, (lipschitz.SpectralDense, lipschitz.SpectralConv2d)):
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            raise ExportError(f"{type(module).__name__} has parametrized weights and no plain form; bake them in first")
        return _conv(module) if isinstance(module, nn.Conv2d) else _linear(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _folded(child))
    return module


def plain(model: nn.Module) -> fx.GraphModule:
    """`fold`, then one flat module of ``torch.nn`` layers, called in order by a graph of torch functions."""
    folded = fold(model)
    try:
        graph = fx.Tracer().trace(folded)
    except Exception as error:  # whatever a model's own forward raises on symbolic tensors
        raise ExportError(
            f"{type(model).__name__} branches on values or shapes in its forward pass, so it cannot be written as plain "
            f"layers: {error}"
        ) from error
    return _flattened(folded, graph)


def _flattened(folded: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Layers and constants under one name each: conv1, norm2, …; dead ends and identities are gone."""
    root = nn.Module()
    names: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.op == "call_module":
            layer = folded.get_submodule(str(node.target))
            if isinstance(layer, (nn.Identity, nn.Dropout, nn.Dropout2d)):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
            if str(node.target) not in names:
                names[str(node.target)] = f"{type(layer).__name__.lower()}{len(names) + 1}"
                root.add_module(names[str(node.target)], layer)
        elif node.op == "get_attr":
            names.setdefault(str(node.target), f"constant{len(names) + 1}")
            path, _, name = str(node.target).rpartition(".")
            value = getattr(folded.get_submodule(path), name)
            root.register_buffer(names[str(node.target)], value.detach().clone())
        else:
            continue
        node.target = names[str(node.target)]
    network = fx.GraphModule(root, graph)
    network.graph.eliminate_dead_code()
    network.graph.lint()
    network.recompile()
    return network
