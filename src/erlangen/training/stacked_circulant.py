"""Block-circulant layers of many models at once.

Forward they are the dense layers they stand for. The gradient of a free parameter is the sum of a dense gradient over
its wrapped diagonal, ∂w_s = Σ_r ∂W[r, (r + s) mod b]; for linear maps that is d_r·x_{(r+s) mod b}, without the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from erlangen.circulant import CirculantConv2d, expand
from erlangen.circulant.algebra import shifts
from erlangen.gradients.kernels import stacked_circulant as kernel
from erlangen.gradients.kernels import usable
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_rows import Taps


class StackedCirculantLinear(StackedLayer):
    """y = W x with the W of every model; per-row gradients of the first rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        m = self.module
        weight = vmap(expand)(self.weight())[:, : m.out_features, : m.in_features]
        rows = x.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        out, bias = rows @ weight.mT, self.parameter("bias")
        if bias is not None:
            out = out + bias[:, None]
        return out.view(*x.shape[:-1], -1), (x, weight)

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        x, weight = saved
        a, d = (t.to(weight.dtype).reshape(x.shape[0], -1, t.shape[-1]) for t in (x, cotangent))
        self.record("weight", self._rows(a, d))
        self.record("bias", d.sum(1))
        if not wants_input:
            return None
        rows = cotangent.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        return (rows @ weight).view(x.shape).to(x.dtype)

    def _rows(self, x: Tensor, d: Tensor) -> Tensor:
        """[N, T, in], [N, T, out] → [N, p, q, b]"""
        b = self.module.block_size
        blocks = lambda t: F.pad(t, (0, -t.shape[-1] % b)).unflatten(-1, (-1, b))  # noqa: E731
        moved = blocks(x)[..., shifts(b, x.device)]  # [N, T, q, r, s]
        return torch.einsum("ntpr,ntqrs->npqs", blocks(d), moved)


class CirculantKernel:
    """A convolution whose channel matrix is block-circulant at every tap."""

    def __init__(self, module: CirculantConv2d) -> None:
        self.block_size, self.channels = module.block_size, (module.out_channels, module.in_channels)
        height, width = module.kernel_size
        self.size: tuple[int, int] = (int(height), int(width))
        self.stride, self.padding, self.dilation = (int(n[0]) for n in (module.stride, module.padding, module.dilation))

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor:
        dense = vmap(expand)(layer.weight())[:, : self.channels[0], : self.channels[1]]
        return dense.permute(0, 3, 4, 2, 1).flatten(1, 3).to(dtype)

    def bias(self, layer: StackedLayer) -> Tensor | None:
        return layer.parameter("bias")

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        fast = usable(rows) and rows.dtype != torch.float64
        folded = (kernel.fold if fast else kernel.reference_fold)(
            rows.contiguous(), self.block_size, self.size[0] * self.size[1], channels
        )
        self._record(layer, folded)

    def folds(self, x: Tensor) -> bool:
        """Whether `pull_maps` can form the gradients of the free parameters at once."""
        return kernel.worth_it(x, self.channels[0], self.block_size)

    def pull_maps(self, layer: StackedLayer, x: Tensor, cotangent: Tensor) -> None:
        """As `pull`, from the maps themselves."""
        plane = (self.size, *((n, n) for n in (self.stride, self.padding, self.dilation)))
        self._record(layer, kernel.gradients(x, cotangent, self.block_size, *plane))

    def _record(self, layer: StackedLayer, folded: Tensor) -> None:
        """[N, p, b·taps, q], the order in which a filter's taps lie."""
        _, p, taps, q = folded.shape
        layer.record("weight", folded, Taps(p, taps, q, taps * q))

    def pull_bias(self, layer: StackedLayer, rows: Tensor) -> None:
        layer.record("bias", rows)


def circulant_kernel(module: nn.Module) -> CirculantKernel | None:
    """How to stack a circulant convolution; None if this is not one, or pads in a way of its own."""
    if type(module) is not CirculantConv2d or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    square = len({*module.stride}) == len({*module.padding}) == len({*module.dilation}) == 1
    return CirculantKernel(module) if square else None
