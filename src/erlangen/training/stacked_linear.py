"""Linear maps of many models at once, dense and block-circulant."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from erlangen.circulant import expand
from erlangen.circulant.algebra import shifts
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_rows import Outer, Rows


class StackedLinear(StackedLayer):
    """In the precision of the parameters: heads are small, and their logits are worth it."""

    def matrix(self) -> Tensor:
        """[E, out, in]"""
        return self.weight()

    def gradients(self, x: Tensor, d: Tensor) -> Rows | Tensor:
        """Of the weight, of each row: from [N, T, in] and [N, T, out]."""
        return Outer(self.stack.models, d[:, 0], x[:, 0]) if x.shape[1] == 1 else torch.bmm(d.mT, x)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        weight, bias = self.matrix(), self.parameter("bias")
        rows = x.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        out = rows @ weight.mT
        if bias is not None:
            out = out + bias[:, None]
        return out.view(*x.shape[:-1], -1), (x, weight)

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        x, weight = saved
        a, d = (t.to(weight.dtype).reshape(x.shape[0], -1, t.shape[-1]) for t in (x, cotangent))
        self.record("weight", self.gradients(a, d))
        self.record("bias", d.sum(1))
        if not wants_input:
            return None
        rows = cotangent.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        return (rows @ weight).view(x.shape).to(x.dtype)


class StackedCirculantLinear(StackedLinear):
    """The dense map that a block-circulant one stands for. The gradient of a free parameter is the sum of a dense one over its
    wrapped diagonal, ∂w_s = Σ_r d_r·x_{(r+s) mod b}, without the matrix."""

    def matrix(self) -> Tensor:
        return vmap(expand)(self.weight())[:, : self.module.out_features, : self.module.in_features]

    def gradients(self, x: Tensor, d: Tensor) -> Tensor:
        """[N, T, in], [N, T, out] → [N, p, q, b]"""
        b = self.module.block_size
        blocks = lambda t: F.pad(t, (0, -t.shape[-1] % b)).unflatten(-1, (-1, b))  # noqa: E731
        moved = blocks(x)[..., shifts(b, x.device)]  # [N, T, q, r, s]
        return torch.einsum("ntpr,ntqrs->npqs", blocks(d), moved)
