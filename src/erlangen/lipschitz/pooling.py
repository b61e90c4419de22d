"""Pooling. Every input is in at most m = ⌈kh/sh⌉·⌈kw/sw⌉ windows, which is all the bounds need.

Max: |max_w x − max_w y|² ≤ Σ_{i∈w}(x_i−y_i)², summed over windows ≤ m·‖x−y‖². L2 norm: the same, by the triangle
inequality.
Mean: rows of the matrix sum to 1, columns to at most m/(kh·kw); Schur's test gives √(m/(kh·kw)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.lipschitz.base import Activation, LipschitzLayer
from erlangen.lipschitz.norms import conv_norm, overlap

_EPS = 1e-4


class _Pool(LipschitzLayer):
    def __init__(self, kernel: int | tuple[int, int] = 2, stride: int | tuple[int, int] | None = None) -> None:
        super().__init__()
        self.kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        step = self.kernel if stride is None else stride
        self.stride = (step, step) if isinstance(step, int) else step

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        if len(x.shape) != 3:
            raise ValueError(f"{type(self).__name__} takes (channels, height, width), not an input of shape {x.shape}")
        size = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:], self.kernel, self.stride)]
        if min(size) < 1:
            raise ValueError(f"a {self.kernel} window does not fit into an input of shape {x.shape}")
        return (x.shape[0], *size)

    def windows(self, x: Activation) -> int:
        _, height, width = self.output_shape(x)
        return overlap(self.kernel, self.stride, (height, width))

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}"


class MaxPool2d(_Pool):
    """The largest of each window."""

    def jacobian_bound(self, x: Activation) -> float:
        return math.sqrt(self.windows(x)) * x.rounded

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride)


class AvgPool2d(_Pool):
    """The mean of each window, which shrinks norms; ``scaled=True`` multiplies by √(kh·kw) to undo that."""

    def __init__(
        self, kernel: int | tuple[int, int] = 2, stride: int | tuple[int, int] | None = None, scaled: bool = False
    ) -> None:
        super().__init__(kernel, stride)
        self.scale = math.sqrt(math.prod(self.kernel)) if scaled else 1.0

    def jacobian_bound(self, x: Activation) -> float:
        """Schur's bound, or the certified norm of the convolution that it is where windows overlap unevenly."""
        bound = math.sqrt(self.windows(x) / math.prod(self.kernel))
        if any(k % s for k, s in zip(self.kernel, self.stride)):
            mean = torch.full((1, 1, *self.kernel), 1.0 / math.prod(self.kernel), dtype=torch.float64)
            bound = min(bound, float(conv_norm(mean, self.stride, self.output_shape(x)[1:])))  # type: ignore[arg-type]
        return self.scale * bound * x.rounded**2

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, self.kernel, self.stride)
        return pooled * self.scale if self.scale != 1.0 else pooled


class L2NormPool2d(_Pool):
    """√(Σx² + ε²) − ε over each window: at most the window's norm, 0 at 0, and differentiable there."""

    def jacobian_bound(self, x: Activation) -> float:
        return math.sqrt(self.windows(x)) * x.rounded**2

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # squares of small values vanish in low precision
            total = F.avg_pool2d(x.to(torch.promote_types(x.dtype, torch.float32)).square(), self.kernel, self.stride)
            return ((total * math.prod(self.kernel) + _EPS**2).sqrt() - _EPS).to(x.dtype)


class GlobalAvgPool(LipschitzLayer):
    """The mean over all positions of each channel; ``scaled=True`` multiplies by √(H·W), making it 1-Lipschitz."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return (x.shape[0],)

    def jacobian_bound(self, x: Activation) -> float:
        return (1.0 if self.scaled else 1.0 / math.sqrt(math.prod(x.shape[1:]))) * x.rounded**2

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return flat.mean(2) * math.sqrt(flat.shape[2]) if self.scaled else flat.mean(2)


class TokenMean(LipschitzLayer):
    """The mean over tokens [T, C] → [C]; ``scaled=True`` multiplies by √T."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return (x.shape[-1],)

    def jacobian_bound(self, x: Activation) -> float:
        return (1.0 if self.scaled else 1.0 / math.sqrt(x.shape[0])) * x.rounded**2

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) * math.sqrt(x.shape[1]) if self.scaled else x.mean(1)
