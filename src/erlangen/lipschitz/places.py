"""Where a network keeps its parameters: found once, then read and exchanged without walking through its modules."""

from __future__ import annotations

from typing import Any

from torch import nn

#: the dictionary of a module that holds a parameter, its key there, and the name that the network knows it by
Place = tuple[dict[str, Any], str, str]


def places(network: nn.Module) -> tuple[Place, ...]:
    """Every place of every parameter. A parameter in several places has one name, the first, in all of them."""
    names = {id(p): name for name, p in network.named_parameters()}
    return tuple(
        (module._parameters, key, names[id(p)])
        for module in network.modules()
        for key, p in module._parameters.items()
        if p is not None
    )
