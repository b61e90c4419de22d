"""Max pooling on a CPU, faster than PyTorch's where channels come first in memory.

Its kernel for such maps takes one number after another, and can be a third of a step of a small network. The one
for maps whose channels come last takes a vector of channels at a time. So that one says where the largest entries are, and they
are picked from the map as it lies: the same values and gradients to the bit, for ties and NaN as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: with fewer channels a vector of them is not worth the copy
FEWEST_CHANNELS = 4


def max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.max_pool2d`, the faster way where there is one."""
    if dilation not in (1, (1, 1)) or not _suits(x):  # spread windows can lie in the padding alone, and point nowhere
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    with torch.no_grad():
        laid = x.detach().contiguous(memory_format=torch.channels_last)
        _, places = F.max_pool2d(laid, kernel_size, stride, padding, 1, ceil_mode, return_indices=True)
    return x.flatten(2).gather(2, places.contiguous().flatten(2)).view(places.shape)


def _suits(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # a batched tensor has no order in memory to ask for
        and x.dtype in (torch.float32, torch.float64)  # cotangents of windows that overlap are added in the map's own precision
        and x.dim() == 4
        and x.shape[1] >= FEWEST_CHANNELS
        and x.numel() > 0
        and x.is_contiguous()
        and not x.is_contiguous(memory_format=torch.channels_last)
    )


def is_plain_max_pool(module: nn.Module) -> bool:
    """Whether `max_pool2d` is all that the module does."""
    return type(module) is nn.MaxPool2d and not module.return_indices and "forward" not in module.__dict__


def pooled(module: nn.MaxPool2d, tape: Any, x: Tensor) -> Tensor:
    """The forward pass of `nn.MaxPool2d`, as a rule's."""
    return max_pool2d(x, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
