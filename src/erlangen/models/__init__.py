"""Networks by name. A builder takes ``(input_shape, classes)`` or, where any image size fits, ``(num_classes, in_channels)``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from erlangen.spelling import hint

if TYPE_CHECKING:
    from torch import nn

#: name → "module:function"; resolved on first use so that listing names costs nothing
_MODELS: dict[str, str | Callable[..., Any]] = {
    "logistic": "erlangen.models.geodp:logistic_regression",
    "mlp": "erlangen.models.small:mlp",
    "cnn": "erlangen.models.small:cnn",
    "opacus-cnn": "erlangen.models.small:opacus_cnn",
    "lenet": "erlangen.models.gredp:lenet5",
    "resnet9": "erlangen.models.resnet:resnet9",
    "wrn-16-4": "erlangen.models.resnet:wrn_16_4",
    "wrn-40-4": "erlangen.models.resnet:wrn_40_4",
    "eq-resnet9": "erlangen.models.equivariant:equivariant_resnet9",
    "eq-resnet9-tuned": "erlangen.models.equivariant:d4_resnet9_tuned",
    "eq-wrn-40-1": "erlangen.models.equivariant:equivariant_wrn_40_1",
    "c8-cnn": "erlangen.models.equivariant:c8_steerable_cnn",
    "c8-tiny": "erlangen.models.equivariant:c8_tiny",
    "resnet20": "erlangen.models.gredp:resnet20",
    "model3": "erlangen.models.gredp:model3",
    "alexnet": "erlangen.models.gredp:alexnet",
    "resnet18": "erlangen.models.gredp:resnet18",
    "geodp-cnn": "erlangen.models.geodp:cnn",
    "resnet3": "erlangen.models.geodp:resnet3",
    "lipschitz-mlp": "erlangen.models.lipschitz:lipschitz_mlp",
    "lipschitz-patches": "erlangen.models.lipschitz:lipschitz_patches",
    "lipschitz-lenet": "erlangen.models.lipschitz:lipschitz_lenet",
    "lipschitz-vgg": "erlangen.models.lipschitz:lipschitz_vgg",
    "lipschitz-resnet": "erlangen.models.lipschitz:lipschitz_resnet",
    "lipschitz-mixer": "erlangen.models.lipschitz:lipschitz_mixer",
}


def register_model(name: str, builder: str | Callable[..., Any]) -> None:
    """Make ``builder(input_shape, classes, **options) -> nn.Module`` known by name."""
    _MODELS[name] = builder


def models() -> list[str]:
    return sorted(_MODELS)


def make_model(name: str, input_shape: tuple[int, ...], classes: int, weights: str | None = None, **options: Any) -> nn.Module:
    """The network of that name, from *public* ``weights`` (a file, see `erlangen.models.public`) if they are given."""
    if name not in _MODELS:
        known, meant = ", ".join(models()), hint(name, models())
        raise ValueError(f"model is {name!r}; choose one of {known}, or load what registers it (--plugin FILE).{meant}")
    builder = _MODELS[name]
    if isinstance(builder, str):
        module, function = builder.split(":")
        builder = getattr(importlib.import_module(module), function)
    own = weights is not None and "weights" in _options(builder)  # what comes after them (freezing, say) is the builder's
    if own:
        options["weights"] = weights
    try:
        if "num_classes" in inspect.signature(builder).parameters:
            model = builder(num_classes=classes, in_channels=input_shape[0], **options)
        else:
            model = builder(input_shape, classes, **options)
    except TypeError as error:
        stranger = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if stranger is None or stranger[1] not in options:
            raise
        free = sorted(_options(builder) - {"weights"})
        raise ValueError(
            f"model {name!r} has no option {stranger[1]!r}; it takes {', '.join(free) or 'none'}.{hint(stranger[1], free)}"
        ) from error
    if weights is None or own:
        return model
    from erlangen.models.public import load_public

    return load_public(model, weights)


def _options(builder: Callable[..., Any]) -> set[str]:
    """What a builder takes beside input and classes, its wrappers' options included."""
    found = set()
    for through in (True, False):
        taken = list(inspect.signature(builder, follow_wrapped=through).parameters.values())
        fixed = ["num_classes", "in_channels"] if "num_classes" in (p.name for p in taken) else [p.name for p in taken[:2]]
        found |= {p.name for p in taken if p.name not in fixed and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return found
