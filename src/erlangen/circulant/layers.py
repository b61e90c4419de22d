"""Linear maps and convolutions with circulant blocks, forward and backward through spectra."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.circulant.algebra import (
    blocks_for,
    coordinates,
    expand,
    multiply,
    nearest,
    real_bins,
    scales,
    signal,
    spectrum,
)
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

    The channels are transformed. DC and Nyquist are real convolutions of q to p channels, every other frequency is a complex
    one that runs as a real one of twice the channels: (2b − 2)/b² of the dense arithmetic.
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
        return self._output(by_frequency(x, self.kernels(self.weight), geometry), self.bias).to(input.dtype)

    def _channels(self, input: Tensor) -> tuple[Tensor, Geometry]:
        """The real coordinates of the channels' spectra, [n, b·q, H, W]: DC, Nyquist, then Re and Im of each frequency."""
        x, padding = explicit_padding(self, input)  # type: ignore[arg-type]
        b, x = self.block_size, x.to(accumulate_dtype(x))
        blocks = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % b)).unflatten(1, (-1, b)).transpose(1, 2)
        return mixed(coordinates(b, x), blocks), Geometry(self.kernel_size, self.stride, padding, self.dilation, 1)

    def kernels(self, weight: Tensor) -> Tensor:
        """ŵ in real coordinates: [b, p, q, k_h, k_w]."""
        weight = weight.to(accumulate_dtype(weight))
        return torch.einsum("kj,pqjhw->kpqhw", self._transform(weight), weight)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The adjoint of `kernels`: [..., b, p, q, k_h, k_w] → [..., p, q, b, k_h, k_w]."""
        return torch.einsum("kj,...kpqhw->...pqjhw", self._transform(gradient), gradient)

    def _transform(self, like: Tensor) -> Tensor:
        b = self.block_size
        return coordinates(b, like) * scales(b, like)[:, None]

    def _output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Coordinates back to channels."""
        y, b = y.to(accumulate_dtype(y)), self.block_size
        out = mixed(coordinates(b, y).T, y.unflatten(1, (b, -1))).unflatten(1, (b, -1)).transpose(1, 2)
        out = out.flatten(1, 2)[:, : self.out_channels]
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


def mixed(matrix: Tensor, x: Tensor) -> Tensor:
    """The matrix on dimension 1: [b, b] on [n, b, c, H, W] → [n, b·c, H, W]."""
    return (matrix.expand(x.shape[0], -1, -1) @ x.flatten(2)).view(x.shape).flatten(1, 2)


def by_frequency(x: Tensor, kernels: Tensor, geometry: Geometry) -> Tensor:
    """conj(ŵ)·x̂ at every frequency: [n, b·q, H, W] and [b, p, q, k_h, k_w] → [n, b·p, H', W']."""
    b, _, q = kernels.shape[:3]
    real, options = real_bins(b), (None, geometry.stride, geometry.padding, geometry.dilation)
    re, im = kernels[real:].unflatten(0, (-1, 2)).unbind(1)
    complex_ = torch.cat([torch.cat([re, im], 2), torch.cat([-im, re], 2)], 1)  # [f, 2p, 2q, k_h, k_w]
    ends, middle = x[:, : real * q], x[:, real * q :]
    outs = [F.conv2d(ends, kernels[:real].flatten(0, 1), *options, real)]
    if b > real:
        outs.append(F.conv2d(middle, complex_.flatten(0, 1), *options, (b - real) // 2))
    return torch.cat(outs, 1)


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
    """Entries of the dense matrix as in torch's own layers: uniform within 1/√fan_in, 0 where nothing comes in."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
