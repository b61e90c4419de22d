"""Buffers that hold mathematical constants: exact in every dtype, never saved, shared by copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class _Shared(dict[str, np.ndarray]):
    """Read-only arrays; copies of a module share them."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Shared:
        return self


class ConstantsModule(nn.Module):
    """A module whose constants are rounded from double precision whenever the module changes its dtype.

    Without this, ``module.double()`` would keep the single-precision rounding of the bases it was built with.
    """

    def __init__(self) -> None:
        super().__init__()
        self._constants = _Shared()
        self.like = torch.empty(0)  # of the module's dtype and device, also where it holds neither parameters nor constants

    def register_constant(self, name: str, values: np.ndarray | None) -> None:
        """A non-persistent buffer: floating arrays in the default dtype, integers as they are, None for absent."""
        if values is None:
            self.register_buffer(name, None, persistent=False)
            return
        tensor = torch.tensor(values)
        if tensor.is_floating_point():
            self._constants[name] = np.asarray(values, dtype=np.float64)
            tensor = tensor.to(torch.get_default_dtype())
        self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ConstantsModule:
        before = {name: getattr(self, name).dtype for name in self._constants}
        super()._apply(fn, recurse)
        self.like = fn(self.like)
        for name, values in self._constants.items():
            buffer = getattr(self, name)
            if buffer.dtype != before[name]:
                setattr(self, name, torch.as_tensor(values).to(buffer))
        return self
