"""Dense layers y = Wx + b over the last dimension, for vectors and for tokens [T, features].

With ‖x‖ ≤ X over all T tokens together and ‖c‖ ≤ G: the weight's gradient Σ_t c_t x_tᵀ has norm ≤ G·X (Cauchy–Schwarz);
the bias is added T times, so its gradient has norm ≤ √T·G and the output norm ≤ l·X + √T·‖b‖.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import MARGIN, Activation, Constrained
from erlangen.lipschitz.norms import Symbols, dense_norm, dense_symbols


class SpectralDense(nn.Linear, Constrained):  # type: ignore[misc]
    """‖W‖₂ ≤ ``lipschitz``, kept by scaling with a certified norm; ‖b‖ ≤ ``bias_bound``."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, lipschitz: float = 1.0, bias_bound: float = 1.0
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.constrain(lipschitz, bias_bound)
        self.start()

    def start(self) -> None:
        """Orthogonal weights at the constraint, bias zero: gradients pass at full size from the first step."""
        nn.init.orthogonal_(self.weight, gain=self.lipschitz)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.project()

    def symbols(self) -> Symbols | None:
        return dense_symbols(self.weight)

    def certified_norm(self) -> Tensor:
        return dense_norm(self.weight)

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        if not x.shape or x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__}({self.in_features}, {self.out_features}) cannot take an input of "
                             f"shape {x.shape}; its last dimension must be {self.in_features}")  # fmt: skip
        return (*x.shape[:-1], self.out_features)

    def jacobian_bound(self, x: Activation) -> float:
        """l, and in low precision |δW| ≤ u|W| entry by entry: ‖δW‖ ≤ u‖W‖_F ≤ u√rank·l."""
        rank = min(self.in_features, self.out_features)
        return self.lipschitz * (1.0 + x.roundoff * math.sqrt(rank)) * x.rounded

    def propagate_input(self, x: Activation) -> Activation:
        shape, bias = self.output_shape(x), 0.0
        if self.bias is not None:
            bias = math.sqrt(_tokens(x)) * self.bias_bound
        return x.to(shape, self.jacobian_bound(x) * x.norm + bias * x.rounded)

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        bounds = {"weight": g * x.norm * x.rounded**2}
        if self.bias is not None:
            bounds["bias"] = g * math.sqrt(_tokens(x)) * x.rounded
        return bounds

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lipschitz={self.lipschitz:g}"


class FrobeniusDense(SpectralDense):
    """‖W‖_F ≤ ``lipschitz``, hence ‖W‖₂ too: cheap to keep, and every row of a one-row head is at full size."""

    def start(self) -> None:
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight.mul_(self.lipschitz / self.weight.norm())
        self.project()

    def symbols(self) -> None:
        """None: its norm is a Frobenius norm."""

    def certified_norm(self) -> Tensor:
        return self.weight.detach().double().norm() * MARGIN


class OrthogonalDense(SpectralDense):
    """Gradient-norm preserving: after each step W is replaced by l times the nearest (semi-)orthogonal matrix.

    ``method="polar"`` takes it from a singular value decomposition; ``"bjorck"`` iterates W ← W(3I − WᵀW)/2. Either way
    the result is certified like any other weight, so an iteration that stops early costs tightness, never privacy.
    """

    method: str
    iterations: int

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, lipschitz: float = 1.0, bias_bound: float = 1.0,
        method: str = "polar", iterations: int = 20,
    ) -> None:  # fmt: skip
        if method not in ("polar", "bjorck"):
            raise ValueError(f"method is {method!r}; choose 'polar' or 'bjorck'")
        self.__dict__.update(method=method, iterations=iterations)  # before nn.Module exists: start() needs them
        super().__init__(in_features, out_features, bias, lipschitz, bias_bound)

    def project(self) -> None:
        w = self.weight.detach()
        w.copy_((orthogonalised(w.double(), self.method, self.iterations) * self.lipschitz).to(w))
        super().project()


def orthogonalised(w: Tensor, method: str = "polar", iterations: int = 20) -> Tensor:
    """The (semi-)orthogonal matrix nearest to each [..., m, n], exactly or after some Björck iterations."""
    if not bool(w.isfinite().all()):
        return torch.zeros_like(w)
    if method == "polar":
        u, _, vh = torch.linalg.svd(w, full_matrices=False)
        return u @ vh
    w = w / torch.linalg.matrix_norm(w, ord=2, keepdim=True).clamp(min=1e-30)
    wide = w.shape[-2] <= w.shape[-1]
    for _ in range(iterations):
        gram = (w @ w.mH) @ w if wide else w @ (w.mH @ w)
        w = 1.5 * w - 0.5 * gram
    return w


def _tokens(x: Activation) -> int:
    return math.prod(x.shape[:-1])
