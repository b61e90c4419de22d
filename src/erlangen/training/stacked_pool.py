"""Pooling layers of a stack: 2×2 pooling on a GPU by a kernel of our own, the rest as the layers have it."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.kernels import stacked_pool as kernel
from erlangen.gradients.kernels import usable


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: bool, relu: bool) -> Tensor:
        ctx.kind = (largest, relu)
        ctx.save_for_backward(*([x] if largest else []))
        return kernel.forward(x, largest, relu)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return kernel.backward(x, cotangent, *ctx.kind), None, None


class StackedPool:
    """Stands for the module's forward, and for a ``relu`` before it; knows the module only as long as it lives."""

    def __init__(self, module: nn.Module, largest: bool) -> None:
        self._module, self.largest, self.relu = weakref.ref(module), largest, False

    def __call__(self, x: Tensor) -> Tensor:
        if usable(x) and kernel.fits(x):
            return _Pool.apply(x, self.largest, self.relu)  # type: ignore[no-untyped-call]
        module: Any = self._module()
        return type(module).forward(module, F.relu(x) if self.relu else x)


def replace_pools(model: nn.Module) -> None:
    """Let every 2×2 pooling layer below a model run as `StackedPool`, with the ReLU before it in a chain."""
    for module in model.modules():
        kind = _two_by_two(module)
        if kind is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = StackedPool(module, kind == "max")
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for chain in model.modules():
        if isinstance(chain, nn.Sequential) and type(chain).forward is nn.Sequential.forward:
            for before, after in itertools.pairwise(chain):
                pool, once = after.__dict__.get("forward"), places[id(before)] == places[id(after)] == 1
                if isinstance(pool, StackedPool) and pool.largest and once and _plain_relu(before):
                    pool.relu = True
                    before.__dict__["forward"] = as_it_is


def as_it_is(x: Tensor) -> Tensor:
    """The forward of a layer that another one has taken over."""
    return x


def _plain_relu(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is nn.ReLU and not hooked and "forward" not in module.__dict__


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
