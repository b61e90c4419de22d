"""The kernels of many models' convolutions at once: plain ones, steerable ones, and ones with block-circulant channels."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from erlangen.circulant import CirculantConv2d, expand
from erlangen.gradients.kernels import stacked_circulant, stacked_conv, stacked_fields, usable
from erlangen.training.stacked import StackedLayer
from erlangen.training.stacked_rows import Fields, Taps

if TYPE_CHECKING:
    from erlangen.equivariant import SteerableConv2d


class Kernel(ABC):
    """How a convolution's kernel [E, k·k·C, O] comes from the parameters, and how gradients go back."""

    size: tuple[int, int]
    stride: int
    padding: int
    dilation: int
    #: how many entries of the channels' matrix are one parameter, along a wrapped diagonal of a block; None: in another way
    block_size: int | None = None

    @abstractmethod
    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor: ...

    def bias(self, layer: StackedLayer) -> Tensor | None:
        return layer.parameter("bias")

    @abstractmethod
    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        """Record gradients w.r.t. the kernel of each row, [N, O, k·k·C and perhaps some zeros]."""

    def joins(self, x: Tensor, outputs: int) -> bool:
        """Whether `pull_maps` can form the gradients of the parameters at once."""
        return False

    def pull_maps(self, layer: StackedLayer, x: Tensor, cotangent: Tensor) -> None:
        """As `pull`, from the maps themselves."""
        raise NotImplementedError

    def pull_bias(self, layer: StackedLayer, rows: Tensor) -> None:
        """Record gradients w.r.t. the bias of every channel of each row, [N, O]."""
        layer.record("bias", rows)


class PlainKernel(Kernel):
    """The kernel is the parameter."""

    block_size = 1

    def __init__(self, module: nn.Module) -> None:
        self.size, self.stride, self.padding, self.dilation = _square(module)

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor:
        return layer.weight().permute(0, 3, 4, 2, 1).flatten(1, 3).to(dtype)

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        layer.record("weight", rows, Taps(rows.shape[1], self.size[0] * self.size[1], channels, rows.shape[2]))


class SteerableKernel(Kernel):
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
        fits = self.basis is not None and stacked_fields.fits(x, outputs, self.block.d_in, self.block.size**2)
        return fits and stacked_conv.worth_it(x, outputs)

    def pull_maps(self, layer: StackedLayer, x: Tensor, cotangent: Tensor) -> None:
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


class CirculantKernel(Kernel):
    """A convolution whose channel matrix is block-circulant at every tap."""

    block_size: int

    def __init__(self, module: CirculantConv2d) -> None:
        self.block_size, self.channels = module.block_size, (module.out_channels, module.in_channels)
        self.size, self.stride, self.padding, self.dilation = _square(module)

    def matrix(self, layer: StackedLayer, dtype: torch.dtype) -> Tensor:
        dense = vmap(expand)(layer.weight())[:, : self.channels[0], : self.channels[1]]
        return dense.permute(0, 3, 4, 2, 1).flatten(1, 3).to(dtype)

    def pull(self, layer: StackedLayer, rows: Tensor, channels: int) -> None:
        fast = usable(rows) and rows.dtype != torch.float64
        folded = (stacked_circulant.fold if fast else stacked_circulant.reference_fold)(
            rows.contiguous(), self.block_size, self.size[0] * self.size[1], channels
        )
        self._record(layer, folded)

    def joins(self, x: Tensor, outputs: int) -> bool:
        return stacked_circulant.worth_it(x, self.channels[0], self.block_size)

    def pull_maps(self, layer: StackedLayer, x: Tensor, cotangent: Tensor) -> None:
        plane = (self.size, *((n, n) for n in (self.stride, self.padding, self.dilation)))
        self._record(layer, stacked_circulant.gradients(x, cotangent, self.block_size, *plane))

    def _record(self, layer: StackedLayer, folded: Tensor) -> None:
        """[N, p, b·taps, q], the order in which a filter's taps lie."""
        _, p, taps, q = folded.shape
        layer.record("weight", folded, Taps(p, taps, q, taps * q))


def kernel_of(module: nn.Module) -> Kernel | None:
    """How to stack this convolution; None if it is not one, or has groups or a padding of its own."""
    conv: Any = module
    if type(module) in (nn.Conv2d, CirculantConv2d):
        plain = getattr(conv, "groups", 1) == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        square = len({*conv.stride}) == len({*conv.padding}) == len({*conv.dilation}) == 1
        return (PlainKernel if type(module) is nn.Conv2d else CirculantKernel)(conv) if plain and square else None
    if type(module).__name__ == "SteerableConv2d" and hasattr(module, "coefficient_gradient"):
        simple = conv.groups == 1 and (conv.padding_mode == "zeros" or not conv.padding)
        return SteerableKernel(conv) if simple else None
    return None


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
