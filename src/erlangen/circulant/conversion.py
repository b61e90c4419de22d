"""Whole models with circulant layers in the place of dense ones."""

from __future__ import annotations

import math

from torch import nn

from erlangen.circulant.layers import CirculantConv2d, CirculantLinear, initialise


def make_circulant(model: nn.Module, block_size: int, skip: tuple[str, ...] = (), fresh: bool = False) -> nn.Module:
    """Replace every Linear and full Conv2d by its nearest circulant twin, in place, except the paths in ``skip``.

    A layer that stands in several places has one twin, in all of them; ``skip`` of one place leaves it in all. A model that
    is itself a layer has its twin returned. ``fresh`` draws new weights instead: the nearest twin of *random* weights is √b
    times too small to train from.
    """
    places: dict[nn.Module, list[str]] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1):
            places.setdefault(layer, []).append(path)
    chosen = {layer: paths for layer, paths in places.items() if not set(paths) & set(skip)}
    _refuse_tied(model, chosen)
    for layer, paths in chosen.items():
        new = _twin(layer, block_size, fresh)
        if layer is model:
            return new
        for path in paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    return model


def _twin(layer: nn.Module, block_size: int, fresh: bool) -> nn.Module:
    """The nearest circulant layer, or one with new weights."""
    new: CirculantLinear | CirculantConv2d
    if isinstance(layer, nn.Linear):
        new, inputs = CirculantLinear.from_dense(layer, block_size), layer.in_features
    else:
        assert isinstance(layer, nn.Conv2d)
        new, inputs = CirculantConv2d.from_dense(layer, block_size), layer.in_channels * math.prod(layer.kernel_size)
    if fresh:
        initialise(new.weight, new.bias, inputs)
    return new


def _refuse_tied(model: nn.Module, chosen: dict[nn.Module, list[str]]) -> None:
    """A tensor that two modules own would be two tensors after conversion: the tie would be lost without a word."""
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, {})[module] = f"{path}.{name}".lstrip(".")
    for who in owners.values():
        if len(who) > 1 and set(who) & set(chosen):
            ours = next(chosen[module][0] for module in who if module in chosen)
            raise ValueError(
                f"{' and '.join(map(repr, who.values()))} are one parameter; a circulant twin would untie them: name {ours!r} and "
                "the others in skip, or share the whole layer"
            )
