"""Fused kernels for the GPU, each with a twin in plain PyTorch that says what it computes.

The kernels are optional: without Triton, or on another device, the same results come from the twins or from the layers'
own code. They are checked against the twins on the GPU and, under Triton's interpreter (``TRITON_INTERPRET=1``), on any
machine. All read bfloat16, float16 or float32 in channels-last order and compute in float32.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from erlangen.gradients.tracing import is_followed

#: Triton runs kernels step by step in Python: for tests on machines without a GPU
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Triton takes a while to import: only where its kernels can run
HAS_TRITON = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
#: use the kernels on any device: for tests under the interpreter
FORCED = False


def usable(*tensors: Tensor) -> bool:
    """Whether a kernel can, and should, be launched on these tensors; inside torch.func they have no memory to read."""
    wanted = HAS_TRITON and not is_followed() and (FORCED or (not INTERPRETED and all(t.is_cuda for t in tensors)))
    return wanted and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


#: programs along the second axis of a launch, where most kernels have rows: CUDA allows no more
ROWS = 65_535


def whole(parts: Iterable[tuple[Tensor, ...]]) -> Any:
    """Results for all rows from those for some rows each, where one launch cannot have them all."""
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


__all__ = ["HAS_TRITON", "INTERPRETED", "ROWS", "power_of_two", "usable", "whole"]
