"""Tensors as text, so that a mechanism's state is plain JSON and a resumed run continues bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def encode(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Floating-point tensors of at least single precision, by name."""
    out = {}
    for name, t in tensors.items():
        array = t.detach().cpu().contiguous().numpy()
        out[name] = {
            "shape": list(t.shape),
            "dtype": array.dtype.str,
            "data": base64.b64encode(array.tobytes()).decode(),
        }
    return out


def decode(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inverse of `encode`; anything but float32 and float64 is refused."""
    out = {}
    for name, entry in state.items():
        if entry["dtype"] not in ("<f4", "<f8"):
            raise ValueError(f"the saved tensor {name!r} has type {entry['dtype']!r}; expected '<f4' or '<f8'")
        array = np.frombuffer(base64.b64decode(entry["data"]), dtype=entry["dtype"]).reshape(entry["shape"])
        out[name] = torch.from_numpy(array.copy())
    return out
