"""Convolutions and transposed convolutions in one, two and three dimensions: any stride, padding, dilation, groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.filtered import KernelFilter
from erlangen.gradients.kernels import conv_gradient, conv_unformed, usable
from erlangen.gradients.kernels.conv2d import HALF, conv2d, few_channels, windowed
from erlangen.gradients.pieces import (
    CHUNK_FLOATS,
    Dense,
    Piece,
    Weight,
    chunk_size,
    gram_is_cheaper,
    gram_norms,
    rescaled,
    unit_scale,
)
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rounding import weighed
from erlangen.gradients.rules.unfolding import Unfolding, cheapest
from erlangen.gradients.sums import over_views, skips_zero_weights
from erlangen.gradients.tape import Tape
from erlangen.gradients.tracing import as_on_gpu

#: flops of one owner's kernel gradient below which calling the native kernel per owner costs more than it computes
SMALL_OWNER = 5e7
#: the same with groups, whose products are small
SMALL_GROUPED_OWNER = 3e6
#: entries of a buffer of windows on a CPU, for each thread: about what its cache holds
WINDOW_FLOATS = 1 << 19

PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Geometry:
    """The hyper-parameters of one convolution, as the native backward wants them."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def weight_gradient(self, x: Tensor, d: Tensor, weight_shape: Sequence[int]) -> Tensor:
        """∂/∂W of Σ_rows ⟨d, conv(x, W)⟩ by the native kernel, one call, without the input gradient."""
        stand_in = x.new_empty(1).expand(tuple(weight_shape))  # only its shape is read
        extra = self.output_padding or (0,) * len(self.kernel)
        return torch.ops.aten.convolution_backward(
            d, x, stand_in, None, self.stride, self.padding, self.dilation, self.transposed, extra, self.groups,
            (False, True, False),
        )[1]  # fmt: skip


class Conv(Piece):
    """Per-owner kernel gradients of a convolution. x: [n·V, C, *S], d: [n·V, O, *S'] with V views per owner."""

    def __init__(self, x: Tensor, d: Tensor, views: int, shape: Sequence[int], geometry: Geometry):
        # under autocast the layer saw its input in the cotangent's precision
        self.x, self.d, self.views, self.shape, self.geometry = x.to(d.dtype), d, views, tuple(shape), geometry

    @property
    def count(self) -> int:
        return self.x.shape[0] // self.views

    @property
    def tokens(self) -> int:
        """Positions of an owner, in all its views."""
        return self.views * math.prod(self.d.shape[2:])

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        if self.geometry.transposed or self.euclidean_only:
            return self.geometry.transposed
        groups = self.geometry.groups
        return not gram_is_cheaper(self.tokens, math.prod(self.shape[1:]), self.shape[0] // groups, self.d)

    def filtered(self, by: KernelFilter) -> Piece:
        """Windows are filtered where they are formed, or maps, where kernels on a GPU form none; with groups only gradients are."""
        from erlangen.gradients.rules.filtered import FilteredConv, FilteredMaps

        if self.geometry.groups > 1 or self.geometry.transposed or not self.count:
            return self
        return FilteredMaps.of(self, by) if self._for_kernels() and FilteredMaps.are_fewer(self, by) else FilteredConv(self, by)

    @property
    def euclidean_only(self) -> bool:  # type: ignore[override]
        """Whether kernels take norms and sums of gradients that are never stored: few positions."""
        return self._for_kernels() and conv_unformed.cheaper(*self._sizes())

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return self.euclidean_only or skips_zero_weights(self.x, self.d)

    def dense(self) -> Tensor:
        """Measured: im2col and batched products; on a CPU the native kernel owner by owner, where owners are so large that
        calling it costs little beside what it computes."""
        if self.geometry.transposed or not self.count:
            return self._dense_by_owner()
        if self.has_kernel():
            return self.by_tap().unflatten(2, self.geometry.kernel).movedim(-1, 2)
        return self._dense_by_windows() if self.by_windows() else self._dense_by_owner()

    def by_windows(self) -> bool:
        """Whether products of windows are the way to the gradients, where no kernel is."""
        if self.geometry.transposed or not self.count:
            return False
        small = SMALL_OWNER if self.geometry.groups == 1 else SMALL_GROUPED_OWNER
        return as_on_gpu(self.x) or 2 * self.tokens * math.prod(self.shape) < small

    def by_tap(self) -> Tensor:
        """[n, O, taps, C]: the kernel gradients as a channels-last network stores them; no groups."""
        if self.has_kernel():
            return self.by_kernel()[0]
        return self._product(last=True).unflatten(-1, (math.prod(self.geometry.kernel), self.shape[1]))

    def by_kernel(self, norms: int = conv_gradient.NOTHING) -> tuple[Tensor, Tensor]:
        """`by_tap`, and what is asked for beside it."""
        return conv_gradient.conv_gradient(self.x, self.d, self.views, *self._plane(), norms)

    def formed(self) -> Piece:
        if not self.has_kernel():
            return super().formed()
        g, norms = self.by_kernel(conv_gradient.OWNERS)
        return Dense(g.unflatten(2, self.geometry.kernel).movedim(-1, 2), norms)

    def _plane(self) -> tuple[Any, Any, Any, Any]:
        g = self.geometry
        return g.kernel, g.stride, g.padding, g.dilation

    def has_kernel(self) -> bool:
        """Whether the fused kernel serves these shapes: maps large enough, and not 1×1, a product without any copy."""
        single = math.prod((*self.geometry.kernel, *self.geometry.stride)) == 1
        return not single and self._for_kernels() and conv_gradient.worth_it(*self._sizes())

    def _for_kernels(self) -> bool:
        """16-bit matrix units and an ordinary convolution in the plane."""
        g = self.geometry
        plain = len(g.kernel) == 2 and g.groups == 1 and not g.transposed
        return plain and self.count > 0 and self.d.dtype in HALF and usable(self.x, self.d)

    def _sizes(self) -> tuple[int, int, int]:
        """Positions of an owner, input channels, output channels."""
        return self.tokens, self.shape[1], self.shape[0]

    def _dense_by_owner(self) -> Tensor:
        out = self.d.new_empty(self.count, *self.shape)
        for i in range(self.count):
            rows = slice(i * self.views, (i + 1) * self.views)
            out[i] = self.geometry.weight_gradient(self.x[rows], self.d[rows], self.shape)
        return out

    def _dense_by_windows(self) -> Tensor:
        if not self.channels_innermost():
            return self._product(last=False).view(self.count, *self.shape)
        return self.by_tap().unflatten(2, self.geometry.kernel).movedim(-1, 2)

    @torch.no_grad()
    def _product(self, last: bool) -> Tensor:
        """Windows times cotangents, [n·G, O/G, window]. Windows exist for a part of the owners at a time, always in the same
        buffer: on a CPU it is still in the cache when the product reads it."""
        d, n, groups, inner = self.cotangents(), self.count, self.geometry.groups, math.prod(self.shape[1:])
        size = self.part(d.shape[-1] * inner * groups)
        windows = self.windows_of(last, size)
        out = d.new_empty(n, groups, self.shape[0] // groups, inner)
        for start in range(0, n, size):
            part = slice(start, min(n, start + size))
            held = windows(part.start, part.stop)
            a = held.view(-1, d.shape[-1], inner) if last else held.view(-1, inner, d.shape[-1]).mT
            torch.bmm(d[part].flatten(0, 1), a, out=out[part].flatten(0, 1))
        return out.flatten(0, 1)

    def part(self, entries: int) -> int:
        """Owners whose windows, of so many entries each, are formed at a time: parts of about equal size."""
        room = CHUNK_FLOATS["cuda"] if as_on_gpu(self.d) else WINDOW_FLOATS * torch.get_num_threads()
        parts = -(-self.count * max(1, entries) // room)
        return max(1, -(-self.count // max(1, parts)))

    def windows_of(self, last: bool, size: int) -> Callable[[int, int], Tensor]:
        """Of owners ``start`` to ``stop``, at most ``size`` of them, in a buffer that is used again: [m, V, *out, *k, C], or
        [m, C, *k, V, *out] with positions innermost."""
        return self._copied(last, size) if as_on_gpu(self.d) else self._unfolded(last, size)

    def _unfolded(self, last: bool, size: int) -> Callable[[int, int], Tensor]:
        way = cheapest(self.x, self.d.shape[2:], self.geometry, last)
        return Unfolding(self.x, self.views, self.d.shape[2:], self.geometry, way, size)

    def _copied(self, last: bool, size: int) -> Callable[[int, int], Tensor]:
        """By one strided copy, as a GPU does it best; by none where they lie so already (a 1×1 kernel)."""
        windows = self._windows_last() if last else self._windows()
        if windows.is_contiguous():
            return lambda start, stop: windows[start:stop]
        buffer = self.d.new_empty(size, *windows.shape[1:])
        return lambda start, stop: buffer[: stop - start].copy_(windows[start:stop])

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        if self.euclidean_only:
            total = conv_unformed.weighted_sum(self.x, self.d, w, self.views, *self._plane())
            return total.unflatten(1, self.geometry.kernel).movedim(-1, 1)
        precise = accumulate_dtype(self.d)  # a weight rounded to bf16 would let a contribution exceed its bound
        x, d = self.x, self.d
        if self.guarded:
            keep = (w != 0).repeat_interleave(self.views).view(-1, *[1] * (d.ndim - 1))
            x, d = torch.where(keep, x, 0.0), torch.where(keep, d, 0.0)
        x, d, w = x.to(precise), d.to(precise), w.to(precise)
        if not d.numel():
            return d.new_zeros(self.shape)
        left, right = weighed(d, x, w, self.views)
        return self.geometry.weight_gradient(right, left, self.shape)

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not None or self.prefers_dense:
            return super().norms_squared(weight)
        if self.euclidean_only:
            return self.unformed_norms()
        return torch.cat([part.gram() for part in self.chunks()])

    def unformed_norms(self, inverse: Tensor | None = None) -> Tensor:
        """Squared norms by the kernel, bounds of what it will add up; ``inverse`` as in `conv_unformed.reference`."""
        return conv_unformed.squared_norms(self.x, self.d, self.views, *self._plane(), inverse)

    def precise(self) -> Conv:
        high = accumulate_dtype(self.d)
        return Conv(self.x.to(high), self.d.to(high), self.views, self.shape, self.geometry)

    def gram(self) -> Tensor:
        (x, size_x), (d, size_d) = unit_scale(self.x, self.count), unit_scale(self.d, self.count)
        scaled = Conv(x, d, self.views, self.shape, self.geometry)
        norms = gram_norms(*(scaled.windows_last() if self.channels_innermost() else scaled.windows()))
        return rescaled(norms.view(self.count, self.geometry.groups).sum(1), size_x, size_d)

    def channels_innermost(self) -> bool:
        """Which windows are copied faster. On a GPU channels-last is what the network stores."""
        g = self.geometry
        return g.groups == 1 and (as_on_gpu(self.x) or cheapest(self.x, self.d.shape[2:], g).last)

    def windows(self) -> tuple[Tensor, Tensor]:
        """im2col by one strided copy: ([n·G, V·T, C/G·k], [n·G, V·T, O/G]), positions innermost in memory."""
        d = self.cotangents().flatten(0, 1)
        return self._windows().reshape(len(d), math.prod(self.shape[1:]), d.shape[2]).mT, d.mT

    def windows_last(self) -> tuple[Tensor, Tensor]:
        """im2col with channels innermost, as a channels-last network stores them: ([n, V·T, k·C], [n, V·T, O])."""
        d = self.cotangents().squeeze(1)
        return self._windows_last().reshape(len(d), d.shape[2], math.prod(self.shape[1:])), d.mT

    def cotangents(self) -> Tensor:
        """[n, G, O/G, V·T]"""
        groups, tokens = self.geometry.groups, math.prod(self.d.shape[2:])
        d = self.d.reshape(self.count, self.views, groups, self.shape[0] // groups, tokens)
        return d.movedim(1, 3).reshape(self.count, groups, self.shape[0] // groups, self.views * tokens)

    def _windows(self) -> Tensor:
        """[n, G, C/G, k…, V, T…], a view."""
        g, spatial, size = self.geometry, len(self.geometry.kernel), self.d.shape[2:]
        x = F.pad(self.x, [p for side in reversed(g.padding) for p in (side, side)]) if any(g.padding) else self.x
        x = x.contiguous()
        rows, channels = x.shape[:2]
        strides = x.stride()
        inner = [s * k for s, k in zip(strides[2:], g.dilation, strict=True)]
        outer = [s * k for s, k in zip(strides[2:], g.stride, strict=True)]
        view = x.as_strided(
            (rows, g.groups, channels // g.groups, *g.kernel, *size),
            (strides[0], strides[1] * (channels // g.groups), strides[1], *inner, *outer),
        )
        return view.unflatten(0, (self.count, self.views)).movedim(1, 3 + spatial)

    def _windows_last(self) -> Tensor:
        """[n, V, T…, k…, C], a view; no groups."""
        g, size = self.geometry, self.d.shape[2:]
        x = self.x.movedim(1, -1).contiguous()
        if any(g.padding):
            x = F.pad(x, [0, 0, *[p for side in reversed(g.padding) for p in (side, side)]])
        rows, *strides, step = x.stride()
        inner = [s * k for s, k in zip(strides, g.dilation, strict=True)]
        outer = [s * k for s, k in zip(strides, g.stride, strict=True)]
        view = x.as_strided((x.shape[0], *size, *g.kernel, x.shape[-1]), (rows, *outer, *inner, step))
        return view.unflatten(0, (self.count, self.views))

    def chunks(self) -> list[Conv]:  # type: ignore[override]
        windows = self.tokens * math.prod(self.shape[1:]) * self.geometry.groups
        per_owner = max(0 if self.has_kernel() else windows, math.prod(self.shape))
        size = chunk_size(per_owner, self.d) * self.views
        parts = zip(self.x.split(size), self.d.split(size), strict=True)
        return [Conv(x, d, self.views, self.shape, self.geometry) for x, d in parts]

    def zero(self, bad: Tensor) -> Conv:
        rows = bad.repeat_interleave(self.views).view(-1, *[1] * (self.d.ndim - 1))
        x, d = torch.where(rows, 0.0, self.x), torch.where(rows, 0.0, self.d)
        return Conv(x, d, self.views, self.shape, self.geometry)


class Windows(Piece):
    """Per-owner kernel gradients from windows [n·V, T, taps·C padded] and cotangents [n·V, O, *S'], channels-last."""

    def __init__(self, windows: Tensor, d: Tensor, views: int, shape: Sequence[int]):
        self.windows, self.d, self.views, self.shape = windows.to(d.dtype), d, views, tuple(shape)

    @property
    def count(self) -> int:
        return self.windows.shape[0] // self.views

    def by_tap(self) -> Tensor:
        """[n, O, taps, C]"""
        rows, positions, width = self.windows.shape
        a = self.windows.reshape(rows // self.views, self.views * positions, width)  # of an empty batch too
        d = self.d.movedim(1, -1).reshape(self.count, a.shape[1], self.shape[0])
        channels, *kernel = self.shape[1:]
        entries = channels * math.prod(kernel)
        return (d.mT @ a)[..., :entries].unflatten(-1, (math.prod(kernel), channels))

    def dense(self) -> Tensor:
        return self.by_tap().unflatten(2, tuple(self.shape[2:])).movedim(-1, 2)

    def weighted_sum(self, w: Tensor) -> Tensor:
        return Dense(self.precise().dense()).weighted_sum(w)

    def precise(self) -> Piece:
        high = accumulate_dtype(self.d)
        return Windows(self.windows.to(high), self.d.to(high), self.views, self.shape)

    def zero(self, bad: Tensor) -> Piece:
        rows = bad.repeat_interleave(self.views)
        windows = torch.where(rows[:, None, None], 0.0, self.windows)
        return Windows(windows, torch.where(rows[:, None, None, None], 0.0, self.d), self.views, self.shape)


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: nn.Conv2d, tape: Tape, input: Tensor) -> Tensor:
    x, padding = explicit_padding(module, input)
    shape = Geometry(module.kernel_size, module.stride, padding, module.dilation, module.groups)
    return tapped_convolution(tape, x, module.weight, module.bias, shape)


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed(module: Any, tape: Tape, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    spatial = len(module.kernel_size)
    extra = module._output_padding(
        input, output_size, module.stride, module.padding, module.kernel_size, spatial, module.dilation
    )
    geometry = Geometry(
        module.kernel_size, module.stride, module.padding, module.dilation, module.groups, True, tuple(extra)
    )
    return tapped_convolution(tape, input, module.weight, module.bias, geometry)


def tapped_convolution(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    parameter: Tensor | None = None,
    through: Callable[[Piece], Piece] = lambda piece: piece,
) -> Tensor:
    """A convolution whose kernel and bias gradients the tape records row by row.

    Where the kernel is computed from a ``parameter``, ``through`` takes the kernel's gradients to the parameter's.
    """
    spatial = len(geometry.kernel)
    if x.ndim != spatial + 2:
        raise ValueError(f"a {spatial}-d convolution got an input of shape {tuple(x.shape)}; keep the batch dimension")
    target = weight if parameter is None else parameter
    out, kept, of_kernel = computed(x, weight.detach(), None if bias is None else bias.detach(), geometry)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        if target.requires_grad:
            yield target, through(of_kernel(saved[0], cotangent, views))
        if bias is not None and bias.requires_grad:
            yield bias, Dense(over_views(cotangent.flatten(2).sum(2), views))

    return tape.tap(out, (kept,), (target, bias), pieces)


#: gradients of a kernel from what was kept of a forward pass, a cotangent, and how many views an owner has
OfKernel = Callable[[Tensor, Tensor, int], "Conv | Windows"]


def computed(x: Tensor, kernel: Tensor, bias: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor, OfKernel]:
    """A convolution's output, what is kept of it for the way back, and the kernel's gradients from that."""
    spatial, shape = len(geometry.kernel), kernel.shape
    plane = geometry.stride, geometry.padding, geometry.dilation
    if geometry.transposed:
        out = _TRANSPOSED[spatial](
            x, kernel, bias, geometry.stride, geometry.padding, geometry.output_padding, geometry.groups,
            geometry.dilation,
        )  # fmt: skip
    elif few_channels(x, shape, geometry.kernel, geometry.groups):  # its windows are formed once and serve both directions
        out, windows = windowed(x, kernel, bias, *plane)
        return out, windows, lambda kept, d, views: Windows(kept, d, views, shape)
    else:
        out = (conv2d if spatial == 2 else PLAIN[spatial])(x, kernel, bias, *plane, geometry.groups)
    return out, x, lambda kept, d, views: Conv(kept, d, views, shape, geometry)


def explicit_padding(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Padding that the native kernel cannot do itself is done first; the rest is passed on."""
    spatial = len(module.kernel_size)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), (0,) * spatial
    if module.padding == "valid":
        return x, (0,) * spatial
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if all(t % 2 == 0 for t in total):
            return x, tuple(t // 2 for t in total)
        return F.pad(x, [p for t in reversed(total) for p in (t // 2, t - t // 2)]), (0,) * spatial
    return x, tuple(module.padding)


__all__ = ["Conv", "Geometry", "convolution", "tapped_convolution", "transposed"]
