"""Random numbers that are not random: an experiment says what is drawn, for one record and for the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Unknown(RuntimeError):
    """Something is drawn that cannot be any number (an index), or that is not alone in what an operation makes."""


class Drawn(TorchDispatchMode):
    """Whatever is drawn inside is ``value``. The generators stay where they were, so that who draws past this is seen to.

    ``apart`` is a row that keeps it, while all others are given 1 − ``value``: along ``dims`` of each draw, if it has any.
    """

    def __init__(
        self, value: float, devices: Iterable[torch.device], apart: int | None = None, dims: Sequence[int | None] = ()
    ) -> None:
        super().__init__()
        self.value, self.devices, self.apart, self.dims = value, list(devices), apart, list(dims)
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with torch.random.fork_rng(devices=self.devices):
            made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:  # in one kernel: what is left of the input, and the mask
            kept = 1 - args[1]
            self._fill(made[1])
            made[0].copy_(args[0] * made[1] / kept if kept else torch.zeros_like(args[0]))
        elif isinstance(made, Tensor) and made.is_floating_point():
            self._fill(made)
        else:
            raise Unknown
        return made

    def _fill(self, drawn: Tensor) -> None:
        k = len(self.shapes)
        self.shapes.append(drawn.shape)
        dim = self.dims[k] if k < len(self.dims) else None
        if self.apart is None or dim is None:
            drawn.fill_(self.value)
        else:
            drawn.fill_(1 - self.value).select(dim, self.apart).fill_(self.value)


def along(more: Sequence[torch.Size], fewer: Sequence[torch.Size], rows: int) -> list[int | None]:
    """In which dimension of each draw the records lie: the one that is shorter by one for one record less."""
    pairs = (zip(a, b, strict=False) for a, b in zip(more, fewer, strict=False))
    return [next((d for d, sizes in enumerate(pair) if sizes == (rows, rows - 1)), None) for pair in pairs]
