"""Linear maps and convolutions with circulant blocks, forward and backward through spectra."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.circulant.algebra import blocks_for, expand, half_weights, multiply, nearest, signal, spectrum
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.rules.conv import Geometry, explicit_padding


class CirculantLinear(nn.Module):
    """y = W x + bias with W made of b×b circulant blocks; the parameter is their first rows, [p, q, b]."""

    def __init__(self, in_features: int, out_features: int, block_size: int, bias: bool = True) -> None:
        super().__init__()
        _check_block(block_size)
        self.in_features, self.out_features, self.block_size = in_features, out_features, block_size
        p, q = blocks_for(out_features, block_size), blocks_for(in_features, block_size)
        self.weight = nn.Parameter(torch.empty(p, q, block_size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        initialise(self.weight, self.bias, in_features)

    def forward(self, input: Tensor) -> Tensor:
        return linear(spectrum(input, self.block_size), self.weight, self.bias, self).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, block_size={self.block_size}, bias={self.bias is not None}"

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The matrix this layer stands for, [out, in]."""
        return expand(self.weight)[: self.out_features, : self.in_features]

    @classmethod
    @torch.no_grad()
    def from_dense(cls, layer: nn.Linear, block_size: int) -> CirculantLinear:
        """The nearest block-circulant layer (least squares): each diagonal of each block becomes its mean."""
        new = cls(layer.in_features, layer.out_features, block_size, layer.bias is not None)
        return _filled(new, nearest(layer.weight, block_size), layer)

    def to_dense(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        new = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        return _filled(new, self.dense(), self)


def linear(x_hat: Tensor, weight: Tensor, bias: Tensor | None, layer: CirculantLinear) -> Tensor:
    y = signal(multiply(x_hat, weight), layer.block_size)
    y = y.flatten(-2)[..., : layer.out_features]
    return y if bias is None else y + bias


_CONV_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class CirculantConv2d(nn.Module):
    """A convolution whose channel matrix is block-circulant at every tap; the parameter is [p, q, b, k_h, k_w].

    The channels are transformed; at each of the b//2 + 1 frequencies a complex convolution runs as a real one of twice
    the channels, all frequencies in one grouped call: (b + 2)·2/b² of the dense arithmetic.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        block_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
    ) -> None:
        super().__init__()
        _check_block(block_size)
        plain = nn.Conv2d(1, 1, kernel_size, stride, padding, dilation, padding_mode=padding_mode)  # checks arguments
        self.in_channels, self.out_channels, self.block_size = in_channels, out_channels, block_size
        self.kernel_size, self.stride, self.dilation = plain.kernel_size, plain.stride, plain.dilation
        self.padding, self.padding_mode = plain.padding, plain.padding_mode
        self._reversed_padding_repeated_twice = plain._reversed_padding_repeated_twice
        p, q = blocks_for(out_channels, block_size), blocks_for(in_channels, block_size)
        self.weight = nn.Parameter(torch.empty(p, q, block_size, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        initialise(self.weight, self.bias, in_channels * math.prod(self.kernel_size))

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3:  # one image without a batch axis, as nn.Conv2d takes it
            return self.forward(input[None])[0]
        x, geometry = self._channels(input)
        return self._output(grouped(x, self.kernels(self.weight), geometry), self.bias).to(input.dtype)

    def _channels(self, input: Tensor) -> tuple[Tensor, Geometry]:
        """The spectrum over channels as real channels, grouped by frequency: [n, f·2q, H, W]."""
        x, padding = explicit_padding(self, input)  # type: ignore[arg-type]
        hat = spectrum(x.movedim(1, -1), self.block_size)  # [n, H, W, q, f]
        by_frequency = torch.stack([hat.real, hat.imag]).permute(1, 5, 0, 4, 2, 3)  # [n, f, 2, q, H, W]
        bins = self.block_size // 2 + 1
        return by_frequency.flatten(1, 3), Geometry(self.kernel_size, self.stride, padding, self.dilation, bins)

    def kernels(self, weight: Tensor) -> Tensor:
        """conj(ŵ) as real 2×2 blocks [[re, im], [−im, re]], one group per frequency: [f·2p, 2q, k_h, k_w]."""
        hat = torch.fft.rfft(weight.to(accumulate_dtype(weight)), dim=2)  # [p, q, f, k, k]
        re, im = hat.real.movedim(2, 0), hat.imag.movedim(2, 0)
        rows = torch.stack([torch.stack([re, im], 2), torch.stack([-im, re], 2)], 1)  # [f, 2, p, 2, q, k, k]
        return rows.flatten(3, 4).flatten(0, 2)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The adjoint of `kernels`: [..., f·2p, 2q, k_h, k_w] → [..., p, q, b, k_h, k_w]."""
        p, q, b = self.weight.shape[:3]
        bins, lead = b // 2 + 1, gradient.shape[:-4]
        g = gradient.to(accumulate_dtype(gradient)).reshape(*lead, bins, 2, p, 2, q, *self.kernel_size)
        g = g.movedim((-6, -4), (0, 1))
        hat = torch.complex(g[0, 0] + g[1, 1], g[0, 1] - g[1, 0]).movedim(-5, -3)  # [..., p, q, f, k, k]
        if not hat.numel():  # nobody's gradients
            return hat.real.new_zeros(*lead, *self.weight.shape)
        halved = hat / half_weights(b, hat).view(-1, 1, 1)
        return torch.fft.irfft(halved, b, dim=-3, norm="forward")

    def _output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Grouped real channels back to ordinary ones."""
        y = y.to(accumulate_dtype(y))  # autocast convolves in half precision, which has no complex numbers
        y = y.unflatten(1, (self.block_size // 2 + 1, 2, -1)).movedim(2, 0)  # [2, n, f, p, H, W]
        hat = torch.complex(y[0].contiguous(), y[1].contiguous()).movedim(1, -1)  # [n, p, H, W, f]
        out = signal(hat, self.block_size).movedim(-1, 2).flatten(1, 2)[:, : self.out_channels]
        return out if bias is None else out + bias[:, None, None]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, block_size={self.block_size}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The kernel this layer stands for, [out, in, k_h, k_w]."""
        return expand(self.weight)[: self.out_channels, : self.in_channels]

    @classmethod
    @torch.no_grad()
    def from_dense(cls, layer: nn.Conv2d, block_size: int) -> CirculantConv2d:
        """The nearest convolution with circulant channel blocks (least squares)."""
        if layer.groups != 1:
            raise ValueError(f"a convolution with groups={layer.groups} has no full channel matrix; convert groups=1")
        options: dict[str, Any] = {n: getattr(layer, n) for n in _CONV_OPTIONS}
        new = cls(layer.in_channels, layer.out_channels, block_size=block_size, bias=layer.bias is not None, **options)
        return _filled(new, nearest(layer.weight, block_size), layer)

    def to_dense(self) -> nn.Conv2d:
        """An ordinary layer that computes the same."""
        options: dict[str, Any] = {n: getattr(self, n) for n in _CONV_OPTIONS}
        new = nn.Conv2d(self.in_channels, self.out_channels, bias=self.bias is not None, **options)
        return _filled(new, self.dense(), self)


def grouped(x: Tensor, kernels: Tensor, geometry: Geometry) -> Tensor:
    return F.conv2d(x, kernels, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def _filled(new: Any, weight: Tensor, old: Any) -> Any:
    """``new`` with this weight and the old layer's bias, on its device and in its precision; what was frozen stays frozen."""
    with torch.no_grad():
        new.to(old.weight.device, old.weight.dtype)
        new.weight.copy_(weight)
        if old.bias is not None:
            new.bias.copy_(old.bias)
    for name, parameter in old.named_parameters(recurse=False):
        getattr(new, name).requires_grad_(parameter.requires_grad)
    return new


def _check_block(block_size: int) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}; circulant blocks need a whole number ≥ 1")


def initialise(weight: Tensor, bias: Tensor | None, fan_in: int) -> None:
    """Entries of the dense matrix as in torch's own layers: uniform within 1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
