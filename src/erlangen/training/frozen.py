"""Features of a frozen trunk, computed once: fine-tuning then costs what its tail costs.

A chain whose first layers do not train gives the same features for a record at every step, as long as no view of it is
drawn anew. They are computed once for all records and kept where the images would be; a step starts behind the trunk. Only
rounding may differ: a library may choose another algorithm for another number of rows. Nothing is released by this: a row of
features is a function of one record and of weights that were public before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile

import torch
from torch import Tensor, nn

#: features may take so many times the memory of the images
SPACE = 4.0
#: records at a time
ROWS = 512


def trunk_of(model: nn.Module) -> nn.Sequential | None:
    """The leading layers of a chain that hold weights and train none; None where there are no such layers.

    Layers that only rearrange (an activation, a pool) belong to the trunk if they stand before its end.
    """
    if type(model) is not nn.Sequential:
        return None
    leading = list(takewhile(lambda layer: not any(p.requires_grad for p in layer.parameters()), model))
    if len(leading) == len(model) or not any(True for layer in leading for _ in layer.parameters()):
        return None
    return nn.Sequential(*leading)


def is_steady(trunk: nn.Module, example: Tensor) -> bool:
    """The same output twice, and no buffer changed: no dropout, no running statistics."""
    buffers = list(trunk.buffers())
    before = [b.clone() for b in buffers]
    with torch.no_grad():
        same = torch.equal(trunk(example), trunk(example))
        moved = not all(torch.equal(a, b) for a, b in zip(before, buffers, strict=True))
        for now, then in zip(buffers, before, strict=True):
            now.copy_(then)
    return same and not moved


class FrozenTrunk:
    """The trunk's features of all records, and the rest of the model."""

    def __init__(self, model: nn.Sequential, trunk: nn.Sequential, features: Tensor) -> None:
        self.features, self.depth = features, len(trunk)
        #: the same layers as the model's, so that what is attached to them and learnt by them is the model's
        self.tail = nn.Sequential(*list(model)[len(trunk) :])

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Tensor,
        precision: Callable[[], AbstractContextManager[object]],
        layout: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> FrozenTrunk | None:
        """None where there is no trunk, where it is not steady, or where its features would take too much memory."""
        trunk = trunk_of(model)
        if trunk is None or len(x) == 0:
            return None
        with torch.no_grad(), precision():
            if not is_steady(trunk, layout(torch.randn_like(x[:2]))):
                return None
            part = trunk(layout(x[:1]))
            if part.nbytes > SPACE * x[:1].nbytes:
                return None
            shape = (len(x), *part.shape[1:])
            features = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=_format(part))
            for start in range(0, len(x), ROWS):
                features[start : start + ROWS] = trunk(layout(x[start : start + ROWS]))
        assert isinstance(model, nn.Sequential)
        return cls(model, trunk, features)


def _format(part: Tensor) -> torch.memory_format:
    """As the trunk lays its maps out, so that no step turns them."""
    turned = part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if turned and not part.is_contiguous() else torch.contiguous_format


__all__ = ["FrozenTrunk", "is_steady", "trunk_of"]
