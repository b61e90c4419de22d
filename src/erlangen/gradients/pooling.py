"""Pooling, faster than PyTorch's.

Max pooling on a CPU, where channels come first in memory: its kernel for such maps takes one number after another, and can be a
third of a step of a small network. The one for maps whose channels come last takes a vector of channels at a time. So that one
says where the largest entries are, and they are picked from the map as it lies: the same values and gradients to the bit, for ties
and NaN as well.

Average pooling on a GPU, where channels come last and windows tile the map: a mean over two axes, and one copy on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.kernels import usable

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


class _Tiles(torch.autograd.Function):
    """Averages over k×k windows that tile a channels-last map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        n, channels, height, width = x.shape
        ctx.k, ctx.windows = k, (n, height // k, k, width // k, k, channels)
        return x.permute(0, 2, 3, 1).view(ctx.windows).mean((2, 4)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        share = (cotangent / ctx.k**2).permute(0, 2, 3, 1)
        n, rows, k, columns, _, channels = ctx.windows
        spread = share[:, :, None, :, None].expand(ctx.windows).contiguous()
        return spread.view(n, rows * k, columns * k, channels).permute(0, 3, 1, 2), None


def averaged(module: Any, tape: Any, x: Tensor) -> Tensor:
    """The forward pass of `nn.AvgPool2d`, or of a module with its options."""
    k = module.kernel_size if isinstance(module.kernel_size, int) else 0
    plain = not getattr(module, "ceil_mode", False) and getattr(module, "divisor_override", None) is None
    tiles = k > 1 and module.stride in (k, (k, k)) and module.padding in (0, (0, 0)) and plain
    if not tiles or x.dim() != 4 or not x.numel() or x.shape[2] % k or x.shape[3] % k or not usable(x):
        return type(module).forward(module, x)
    return _Tiles.apply(x, k) if x.is_contiguous(memory_format=torch.channels_last) else type(module).forward(module, x)
