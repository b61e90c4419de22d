"""Convolutions with certified norms: zero padding, dilation 1, one group, any kernel and stride.

With ‖x‖ ≤ X and ‖c‖ ≤ G. Kernel: ∂L/∂K_a = Σ_t c_t x_{st+a}ᵀ, so ‖∂L/∂K‖² ≤ Σ_a ‖c‖²·Σ_t‖x_{st+a}‖² ≤ G²·X²·m, where
m is the number of windows an input pixel can be in: ⌈kh/sh⌉·⌈kw/sw⌉. Bias, added at every one of Ho·Wo positions:
‖∂L/∂b‖ ≤ √(Ho·Wo)·G, and it moves the output by at most √(Ho·Wo)·‖b‖.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import MARGIN, Activation, Constrained
from erlangen.lipschitz.dense import orthogonalised
from erlangen.lipschitz.norms import Symbols, certified, conv_symbols, overlap, polyphase


class SpectralConv2d(nn.Conv2d, Constrained):
    """A convolution of operator norm ≤ ``lipschitz``; ``padding`` defaults to half the kernel ("same" for odd ones)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] | None = None, bias: bool = False,
        lipschitz: float = 1.0, bias_bound: float = 1.0,
    ) -> None:  # fmt: skip
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        pad = (kernel[0] // 2, kernel[1] // 2) if padding is None else padding
        if isinstance(pad, str):
            raise ValueError(f"padding is {pad!r}; give a number of zeros (or None for half the kernel)")
        super().__init__(in_channels, out_channels, kernel, stride, pad, bias=bias)
        self.outputs: tuple[int, int] | None = None
        self.constrain(lipschitz, bias_bound)
        self.start()

    def start(self) -> None:
        """An orthogonal matrix on the central tap, zero elsewhere: norms are kept from the first step. Bias zero.

        Such a convolution applies one matrix to (some of) the pixels, so its norm is that of the matrix.
        """
        taps = self.weight.shape[2:]
        central = nn.init.orthogonal_(torch.empty(self.weight.shape[:2]), gain=self.lipschitz / MARGIN)
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, taps[0] // 2, taps[1] // 2] = central / MARGIN
            if self.bias is not None:
                self.bias.zero_()

    def symbols(self) -> Symbols:
        return conv_symbols(self.weight, self.stride, self.outputs)  # type: ignore[arg-type]

    def certified_norm(self) -> Tensor:
        return certified([self.symbols()])[0]

    def frobenius_factor(self) -> float:
        return math.sqrt(overlap(self.kernel_size, self.stride))  # type: ignore[arg-type]

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        if len(x.shape) != 3 or x.shape[0] != self.in_channels:
            raise ValueError(f"{type(self).__name__} of {self.in_channels} channels cannot take an input of shape "
                             f"{x.shape}; give (channels, height, width)")  # fmt: skip
        if self.padding_mode != "zeros" or any(d != 1 for d in self.dilation) or self.groups != 1:
            raise ValueError("a convolution's certified norm holds for zero padding, dilation 1 and one group only")
        padding = [int(p) for p in self.padding]
        size = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[1:], padding, self.kernel_size, self.stride)]
        if min(size) < 1:
            raise ValueError(f"a {self.kernel_size} convolution does not fit into an input of shape {x.shape}")
        return (self.out_channels, *size)

    def learn_size(self, outputs: tuple[int, int]) -> None:
        """Certify for this output size from now on; a layer used at two sizes is certified for all."""
        if self.outputs is None:
            self.outputs = outputs
        elif self.outputs != outputs:
            self.outputs = (10**9, 10**9)

    def jacobian_bound(self, x: Activation) -> float:
        """l, and in low precision ‖δK‖ ≤ c·u·‖K‖_F ≤ c·u·√rank·l (Parseval: ‖K‖_F² is the mean of ‖P(θ)‖_F²)."""
        rank = min(self.out_channels, self.in_channels * self.stride[0] * self.stride[1])
        return self.lipschitz * (1.0 + x.roundoff * self.frobenius_factor() * math.sqrt(rank)) * x.rounded

    def propagate_input(self, x: Activation) -> Activation:
        shape, bias = self.output_shape(x), 0.0
        self.learn_size((shape[1], shape[2]))
        if self.bias is not None:
            bias = math.sqrt(shape[1] * shape[2]) * self.bias_bound
        return x.to(shape, self.jacobian_bound(x) * x.norm + bias * x.rounded)

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        _, height, width = self.output_shape(x)
        windows = overlap(self.kernel_size, self.stride, (height, width))  # type: ignore[arg-type]
        bounds = {"weight": g * x.norm * math.sqrt(windows) * x.rounded**2}
        if self.bias is not None:
            bounds["bias"] = g * math.sqrt(height * width) * x.rounded
        return bounds

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lipschitz={self.lipschitz:g}"


class OrthogonalConv2d(SpectralConv2d):
    """As close to gradient-norm preserving as a kernel of this size gets, then certified.

    Where windows do not overlap (kernel ≤ stride) the operator is one matrix applied to disjoint patches, and it is
    made orthogonal exactly. Elsewhere ``sweeps`` alternating projections are made between orthogonal symbols P(θ) and
    kernels of the right size: the result is nearly orthogonal, and never more than ``lipschitz`` in norm.
    """

    sweeps: int

    def __init__(self, *args: int, sweeps: int = 3, **options: float) -> None:
        self.__dict__["sweeps"] = sweeps
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def project(self) -> None:
        w = self.weight.detach()
        kernel = polyphase(w.double(), self.stride)  # type: ignore[arg-type]
        taps = kernel.shape[2:]
        grid = tuple(1 if t == 1 else 4 * t for t in taps)
        for _ in range(1 if grid == (1, 1) else self.sweeps):
            symbols = torch.fft.fft2(kernel, s=grid).permute(2, 3, 0, 1)
            full = torch.fft.ifft2(orthogonalised(symbols).permute(2, 3, 0, 1)).real
            kernel = full[..., : taps[0], : taps[1]]
        w.copy_((self._from_phases(kernel) * self.lipschitz).to(w))
        super().project()

    def _from_phases(self, kernel: Tensor) -> Tensor:
        """Inverse of `polyphase`; taps outside the kernel are dropped."""
        (sh, sw), (kh, kw) = self.stride, self.kernel_size
        split = kernel.unflatten(1, (-1, sh, sw)).permute(0, 1, 4, 2, 5, 3)
        return split.flatten(4, 5).flatten(2, 3)[..., :kh, :kw]
