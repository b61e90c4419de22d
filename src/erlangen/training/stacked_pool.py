"""Pooling layers of a stack: 2×2 pooling on a GPU by a kernel of our own, the rest as the layers have it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.kernels import stacked_pool as kernel
from erlangen.gradients.kernels import usable


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: bool) -> Tensor:
        ctx.largest = largest
        ctx.save_for_backward(*([x] if largest else []))
        return kernel.forward(x, largest)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0] if ctx.largest else None
        return kernel.backward(x, cotangent, ctx.largest), None


class StackedPool:
    """Stands for the module's forward; knows the module only as long as it lives."""

    def __init__(self, module: nn.Module, largest: bool) -> None:
        self._module, self.largest = weakref.ref(module), largest

    def __call__(self, x: Tensor) -> Tensor:
        if usable(x) and kernel.fits(x):
            return _Pool.apply(x, self.largest)  # type: ignore[no-untyped-call]
        module: Any = self._module()
        return type(module).forward(module, x)


def replace_pools(model: nn.Module) -> None:
    """Let every 2×2 pooling layer below a model run as `StackedPool`."""
    for module in model.modules():
        kind = _two_by_two(module)
        if kind is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = StackedPool(module, kind == "max")


def _two_by_two(module: Any) -> str | None:
    from erlangen.equivariant import SpatialAvgPool, SpatialMaxPool

    kinds = {nn.MaxPool2d: "max", SpatialMaxPool: "max", nn.AvgPool2d: "mean", SpatialAvgPool: "mean"}
    kind = kinds.get(type(module))
    if kind is None:
        return None
    simple = not any(getattr(module, name, None) for name in ("ceil_mode", "return_indices", "divisor_override"))
    plain = module.padding in (0, (0, 0)) and getattr(module, "dilation", 1) in (1, (1, 1))
    hooked = module._forward_hooks or module._forward_pre_hooks
    two = module.kernel_size in (2, (2, 2)) and module.stride in (2, (2, 2))
    return kind if two and plain and simple and not hooked else None
