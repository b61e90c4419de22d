"""Batched forms of the layers small networks are made of: linear maps, convolutions (plain, steerable), group norms."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from erlangen.gradients.joined import chains
from erlangen.gradients.kernels import stacked_fields, usable
from erlangen.gradients.kernels import stacked_norm as kernel
from erlangen.gradients.kernels.norm_act import _TWINS as TWINS
from erlangen.gradients.kernels.norm_act import NormAct
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_circulant import circulant_kernel
from erlangen.training.stacked_pool import as_it_is
from erlangen.training.stacked_rows import Fields, Outer, Taps

if TYPE_CHECKING:
    from erlangen.equivariant import SteerableConv2d
    from erlangen.training.stacked import Stack


class StackedLinear(StackedLayer):
    """In the precision of the parameters: heads are small, and their logits are worth it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        weight, bias = self.weight(), self.parameter("bias")
        rows = x.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        out = rows @ weight.mT
        if bias is not None:
            out = out + bias[:, None]
        return out.view(*x.shape[:-1], -1), (x, weight)

    def backward(self, saved: Any, cotangent: Tensor, wants_input: bool) -> Tensor | None:
        x, weight = saved
        a, d = (t.to(weight.dtype).reshape(x.shape[0], -1, t.shape[-1]) for t in (x, cotangent))
        one = a.shape[1] == 1
        self.record("weight", Outer(self.stack.models, d[:, 0], a[:, 0]) if one else torch.bmm(d.mT, a))
        self.record("bias", d.sum(1))
        if not wants_input:
            return None
        rows = cotangent.to(weight.dtype).unflatten(0, (self.stack.models, -1)).flatten(1, -2)
        return (rows @ weight).view(x.shape).to(x.dtype)


class Kernel(Protocol):
    """How a convolution's kernel [E, k·k·C, O] comes from the parameters, and how gradients go back."""

    size: tuple[int, int]
    stride: int
    padding: int
    dilation: int

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor: ...

    def bias(self, layer: StackedLayer) -> Tensor | None: ...

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        """Record gradients w.r.t. the kernel of each row, [N, O, k·k·C and perhaps some zeros]."""

    def pull_bias(self, layer: StackedLayer, rows: Tensor) -> None:
        """Record gradients w.r.t. the bias of every channel of each row, [N, O]."""


class PlainKernel:
    """The kernel is the parameter."""

    def __init__(self, module: nn.Module) -> None:
        self.size, self.stride, self.padding, self.dilation = _square(module)

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor:
        return layer.weight().permute(0, 3, 4, 2, 1).flatten(1, 3).to(dtype)

    def bias(self, layer: StackedLayer) -> Tensor | None:
        return layer.parameter("bias")

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        layer.record("weight", rows, Taps(rows.shape[1], self.size[0] * self.size[1], channels, rows.shape[2]))

    def pull_bias(self, layer: StackedLayer, rows: Tensor) -> None:
        layer.record("bias", rows)


class SteerableKernel:
    """The kernel is expanded from coefficients. One pair of representations and a dense basis make one product each way."""

    def __init__(self, module: SteerableConv2d) -> None:
        self._module = weakref.ref(module)
        self.size = (module.kernel_size, module.kernel_size)
        self.stride, self.padding, self.dilation = module.stride, module.padding, module.dilation
        self.basis: Tensor | None = None
        expansion = module.expansion
        blocks: list[Any] = list(expansion.blocks.values())
        sorted_channels = expansion.out_order is None and expansion.in_order is None
        one_pair = len(expansion.in_type.distinct) == len(expansion.out_type.distinct) == len(blocks) == 1
        if sorted_channels and one_pair and not module.standardise and getattr(blocks[0], "dense", None) is not None:
            self.block = blocks[0]
            dense = self.block.dense.view(-1, self.block.d_out, self.block.d_in, self.block.size**2)
            self.basis = dense.transpose(2, 3).flatten(1).contiguous()  # [n, d_out·k·k·d_in], components innermost

    @property
    def module(self) -> Any:
        return self._module()

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor:
        theta = layer.weight()
        if self.basis is None:
            expansion, module = self.module.expansion, self.module
            coefficients = vmap(lambda t: expansion.standardise(t, module.eps))(theta) if module.standardise else theta
            return vmap(expansion.expand)(coefficients).permute(0, 3, 4, 2, 1).flatten(1, 3).to(dtype)
        b, e = self.block, theta.shape[0]
        entries = theta.view(e, b.fields_out * b.fields_in, b.dimension) @ self.basis.to(theta)
        split = entries.view(e, b.fields_out, b.fields_in, b.d_out, b.size**2, b.d_in)
        return split.permute(0, 4, 2, 5, 1, 3).to(dtype).reshape(e, b.size**2 * b.fields_in * b.d_in, -1)

    def bias(self, layer: StackedLayer) -> Tensor | None:
        bias = layer.parameter("bias")
        return None if bias is None else bias @ self.module.invariants.to(bias).T

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        rows = by_tap(rows, self.size, channels)
        if self.basis is None:
            layer.record("weight", self._pull_any(layer, rows))
            return
        b = self.block
        split = rows.view(rows.shape[0], b.fields_out, b.d_out, b.size**2, b.fields_in, b.d_in)
        entries = widened(split).permute(0, 1, 4, 2, 3, 5).contiguous().view(rows.dtype).view(-1, self.basis.shape[1])
        layer.record("weight", (entries @ self.basis.to(entries).T).view(rows.shape[0], -1))

    def joins(self, x: Tensor, outputs: int) -> bool:
        """Whether `pull_maps` can form the gradients in the order of the basis."""
        return self.basis is not None and stacked_fields.fits(x, outputs, self.block.d_in, self.block.size**2)

    def pull_maps(self, layer: StackedLayer, x: Tensor, cotangent: Tensor) -> None:
        """As `pull`, from the maps themselves."""
        assert self.basis is not None
        b = self.block
        pairs = stacked_fields.gradients(x, cotangent, b.d_in, self.size, self.stride, self.padding, self.dilation)
        entries = pairs.view(-1, self.basis.shape[1])  # [N·in·out, d_out·k·k·d_in]
        rows = (entries @ self.basis.to(entries).T).view(x.shape[0], -1)
        layer.record("weight", rows, Fields(b.fields_out, b.fields_in))

    def _pull_any(self, layer: StackedLayer, rows: Tensor) -> Tensor:
        theta, module = layer.weight(), self.module
        kernels = rows.transpose(2, 3).unflatten(3, self.size).to(theta.dtype)
        pulled = module.expansion.pullback(kernels)
        if not module.standardise:
            return pulled
        back = vmap(lambda t, g: module.expansion.standardise_vjp(t, g, module.eps))
        return back(theta, pulled.unflatten(0, (theta.shape[0], -1))).flatten(0, 1)

    def pull_bias(self, layer: StackedLayer, rows: Tensor) -> None:
        if self.module.bias is not None:
            layer.record("bias", rows @ self.module.invariants.to(rows))


def kernel_of(module: nn.Module) -> Kernel | None:
    """How to stack this convolution; None if it is not one, or has groups or a padding of its own."""
    if type(module) is nn.Conv2d:
        plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        square = len({*module.stride}) == len({*module.padding}) == len({*module.dilation}) == 1
        return PlainKernel(module) if plain and square else None
    if type(module).__name__ == "SteerableConv2d" and hasattr(module, "coefficient_gradient"):
        steerable: Any = module
        simple = steerable.groups == 1 and (steerable.padding_mode == "zeros" or not steerable.padding)
        return SteerableKernel(steerable) if simple else None
    return circulant_kernel(module)


def by_tap(rows: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """[N, O, k·k·C and perhaps some zeros] → [N, O, k·k, C]"""
    taps = size[0] * size[1]
    return rows[..., : taps * channels].reshape(*rows.shape[:2], taps, channels)


def _square(module: Any) -> tuple[tuple[int, int], int, int, int]:
    return module.kernel_size, module.stride[0], module.padding[0], module.dilation[0]


def widened(t: Tensor) -> Tensor:
    """The same memory in elements of 16 or 8 bytes where the last dimension allows: strided copies move whole elements."""
    for dtype in (torch.complex128, torch.int64):
        count = dtype.itemsize // t.element_size()
        parts = (t.shape[-1], t.storage_offset(), *t.stride()[:-1])
        if count > 1 and t.stride(-1) == 1 and not any(part % count for part in parts):
            return t.view(dtype)
    return t


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
