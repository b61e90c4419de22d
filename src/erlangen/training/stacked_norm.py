"""Group norms of many models at once, plain and equivariant, and the activations that they take over."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from erlangen.gradients.joined import chains
from erlangen.gradients.kernels import stacked_norm as kernel
from erlangen.gradients.kernels import usable
from erlangen.gradients.kernels.norm_act import TWINS, NormAct
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_pool import as_it_is

if TYPE_CHECKING:
    from erlangen.training.stacked import Stack


def is_plain_norm(module: nn.Module) -> bool:
    if type(module) is nn.GroupNorm:
        return True
    return type(module).__name__ == "EquivariantGroupNorm" and not getattr(module, "per_element", True)


def join_activations(model: nn.Module) -> None:
    """Let every norm of a stack that follows an activation in a chain do both, in one pass over the map."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for chain, found in chains(model):
        for run in found:
            norm, before = run.norm.module.__dict__.get("forward"), list(chain)[run.start]
            once = places[id(before)] == places[id(run.norm.module)] == 1
            if isinstance(norm, StackedNorm) and run.spec.pre != "identity" and once and "forward" not in before.__dict__:
                norm.spec = dataclasses.replace(norm.spec, pre=run.spec.pre)
                before.__dict__["forward"] = as_it_is


class StackedNorm(StackedLayer):
    """Group norm on channels-last maps: statistics and sums in float32, one multiply-add each way.

    With s₁ = Σd and s₂ = Σd·x over the positions of a channel, all gradients follow from sums of length C. The norm may
    have taken over an activation before it, ``spec.pre``: in the same kernel where there is one.
    """

    def __init__(self, stack: Stack, module: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__(stack, module, names)
        norm: Any = module
        self.groups = int(norm.num_groups if isinstance(module, nn.GroupNorm) else norm.groups)
        self.field, self.eps = int(getattr(norm, "field_size", 1)), float(norm.eps)
        self.spec = NormAct(self.groups, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        pre = self.spec.pre
        return super().__call__(x if pre == "identity" or self._fast(x) else TWINS[pre](x))

    def _fast(self, x: Tensor) -> bool:
        return usable(x) and kernel.fits(x, self.spec)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        if self._fast(x):
            gamma, beta = self._affine("weight", x, 1.0), self._affine("bias", x, 0.0)
            z, *statistics = kernel.forward(x, gamma, beta, self.spec)
            return z, (x, gamma, *statistics)
        return self._by_hand(x)

    def _by_hand(self, x: Tensor) -> tuple[Tensor, Any]:
        maps, rows = self._split(x), x.shape[0]  # [N, T, G, C/G]
        precise = torch.promote_types(x.dtype, torch.float32)
        count = maps.shape[1] * maps.shape[3]
        mean = maps.sum(1, dtype=precise).sum(-1) / count
        square = torch.linalg.vector_norm(maps, dim=1, dtype=precise).square().sum(-1) / count
        inverse = torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        weight, bias = self._per_channel("weight", rows, 1.0, mean), self._per_channel("bias", rows, 0.0, mean)
        scale = weight * inverse[..., None]
        shift = bias - scale * mean[..., None]
        out = torch.addcmul(shift[:, None].to(x.dtype), maps, scale[:, None].to(x.dtype))
        return self._join(out, x.shape), (maps, mean, inverse, weight, x.shape)

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        if len(saved) == 4:
            x, gamma, mean, rstd = saved
            dx, along, first = kernel.backward(x, cotangent, gamma, mean, rstd, self.spec)
            self._record(along, first)
            return dx if wants_input else None
        maps, mean, inverse, weight, shape = saved
        d, mean, inverse = self._split(cotangent), mean[..., None], inverse[..., None]
        first = d.sum(1, dtype=mean.dtype)  # Σd, [N, G, C/G]
        along = ((d * maps).sum(1, dtype=mean.dtype) - mean * first) * inverse  # Σd·x̂
        self._record(along, first)
        if not wants_input:
            return None
        count = maps.shape[1] * maps.shape[3]
        a = (weight * first).sum(-1, keepdim=True) / count
        b = (weight * along).sum(-1, keepdim=True) / count * inverse.square()
        like = lambda t: t[:, None].to(maps.dtype)  # noqa: E731
        out = torch.addcmul(like(b * mean - a * inverse), maps, like(-b)).addcmul_(d, like(weight * inverse))
        return self._join(out, shape)

    def _record(self, along: Tensor, first: Tensor) -> None:
        """Σd·x̂ and Σd of every row and channel, summed over the channels that share a parameter."""
        per_field = lambda t: t.flatten(1).unflatten(1, (-1, self.field)).sum(2) if self.field > 1 else t.flatten(1)  # noqa: E731
        self.record("weight", per_field(along))
        self.record("bias", per_field(first))

    def _affine(self, local: str, x: Tensor, default: float) -> Tensor:
        """[E, C] in float32"""
        values = self.parameter(local)
        if values is None:
            return torch.full((self.stack.models, x.shape[1]), default, device=x.device)
        return values.float().repeat_interleave(self.field, 1).contiguous()

    def _split(self, x: Tensor) -> Tensor:
        positions = x.flatten(2).transpose(1, 2) if x.ndim > 2 else x.unsqueeze(1)
        return positions.unflatten(2, (self.groups, -1))

    def _join(self, maps: Tensor, shape: torch.Size) -> Tensor:
        return maps.flatten(2).transpose(1, 2).unflatten(2, shape[2:]) if len(shape) > 2 else maps.reshape(shape)

    def _per_channel(self, local: str, rows: int, default: float, like: Tensor) -> Tensor:
        """[N, G, C/G]"""
        values = self.parameter(local)
        if values is None:
            return like.new_full((rows, self.groups, 1), default)
        wide = values.repeat_interleave(self.field, 1).unflatten(1, (self.groups, -1))
        return wide.repeat_interleave(rows // wide.shape[0], 0)
