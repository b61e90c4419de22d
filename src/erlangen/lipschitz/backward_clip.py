"""Clipping of cotangents on their way back: the identity forwards, ‖c_i‖ ≤ c backwards (paper, section 3.1).

The bound acts on the cotangent of one sample's own loss. A batch carries it scaled: divided by the number of rows in a
mean, by the number of views of a record. `RowScale` says by how much, row by row; the recorder sets it in private
training. Because the clip looks at one row at a time, everything behind it stays a sum of per-sample terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from erlangen.lipschitz.base import Activation, LipschitzLayer

#: the least bound that adapting goes to, and one over the largest: squares of shorter cotangents leave float32
LEAST = 1e-12


@dataclass(frozen=True)
class RowScale:
    """``scale``: what a row's cotangent was multiplied by. ``share``: the row's part of its owner, Σ ≤ 1 per owner."""

    scale: Tensor
    share: Tensor


def limited(cotangent: Tensor, bound: float | Tensor, times: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Rows cut to norm ≤ bound (one for all, or one each), then multiplied by ``times``; also the old norms.

    A row that is not finite becomes zero. Norms are taken in float64, where no float32 overflows: one that is not finite
    belongs to a row that is not, and dividing by it leaves zeros and NaN.
    """
    rows = cotangent.flatten(1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    precise = torch.promote_types(rows.dtype, torch.float32)
    safe = bound * (1.0 - 64 * torch.finfo(precise).eps)
    divisor = (norms / (safe * times)).clamp(min=1.0 / times).to(precise)
    cut = (rows / divisor[:, None]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return cut.to(cotangent.dtype).view_as(cotangent), norms


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: BackwardClip) -> Tensor:
        ctx.layer, ctx.rows = layer, layer.rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.layer.cut(cotangent, ctx.rows), None


class BackwardClip(LipschitzLayer):
    """Cotangents of norm ≤ ``bound`` go back. Costs no privacy: the bound is fixed."""

    followed: tuple[str, ...] = ("bound", "rows")

    def __init__(self, bound: float, reduction: str = "mean") -> None:
        super().__init__()
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound is {bound!r}; it must be a positive, finite number")
        self.bound, self.reduction = float(bound), reduction
        self.rows: RowScale | None = None

    @property
    def undoes_means(self) -> bool:
        """Whether what a mean divides by is taken into account: then the cut is that of each record's own cotangent."""
        return self.reduction == "mean"

    def forward(self, x: Tensor) -> Tensor:
        return _Clip.apply(x, self)

    def scale(self, cotangent: Tensor, rows: RowScale | None) -> Tensor:
        """Per row, what the loss was multiplied by: 1/n for a mean outside private training."""
        if rows is not None:
            return rows.scale.to(cotangent.device)
        n = cotangent.shape[0]
        return torch.full((n,), 1.0 / max(n, 1) if self.reduction == "mean" else 1.0, device=cotangent.device)

    def cut(self, cotangent: Tensor, rows: RowScale | None) -> Tensor:
        return limited(cotangent, self.bound * self.scale(cotangent, rows))[0]

    def backpropagate_cotangent(self, x: Activation, g: float) -> float:
        return min(g, self.bound) * x.rounded

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}"


class AdaptiveBackwardClip(BackwardClip):
    """The bound follows a quantile of the cotangents' norms, privately (as Andrew et al. 2021 do for gradients).

    Each step releases Σ_i (1{‖c_i‖ ≤ c} − ½), of sensitivity ½, with noise ``count_std``; b̃ is the noisy fraction, and
    c ← c·exp(−rate·(b̃ − quantile)).
    The mechanism pays for it: with several such layers the gradient's multiplier is (σ⁻² − Σ(2·count_std)⁻²)^(−½).
    """

    followed = ("bound", "rows", "count_std", "pending", "total")

    def __init__(
        self, bound: float, quantile: float = 0.9, rate: float = 0.2, count_std: float | None = None,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(bound, reduction)
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; it must lie strictly between 0 and 1")
        if not rate > 0 or (count_std is not None and not count_std > 0):
            raise ValueError(f"rate is {rate} and count_std {count_std}; both must be positive")
        self.quantile, self.rate, self.count_std, self._open = quantile, rate, count_std, count_std is None
        #: the count of the last backward pass, and of those that were taken into this release
        self.pending, self.total = 0.0, 0.0

    def prepare(self, noise_multiplier: float, expected_batch: float) -> None:
        """Settle the noise of the count if it was left open: a twentieth of a batch, at most 1 % of the budget."""
        if self._open:
            self.count_std = max(expected_batch / 20.0, 5.0 * noise_multiplier)

    def cut(self, cotangent: Tensor, rows: RowScale | None) -> Tensor:
        scale = self.scale(cotangent, rows)
        cut, norms = limited(cotangent, self.bound * scale)
        if rows is not None:
            below = (norms <= self.bound * scale).to(norms.dtype) - 0.5
            self.pending = float((rows.share.to(norms) * below).sum().detach())
        return cut

    def update(self, noisy_total: float, expected_batch: float) -> None:
        """Adapt to the private answer; the count starts again."""
        fraction = min(max(noisy_total / expected_batch + 0.5, 0.0), 1.0)
        moved = self.bound * math.exp(-self.rate * (fraction - self.quantile))
        self.bound = min(max(moved, LEAST), 1.0 / LEAST)  # where no cotangent follows, it would leave float32, and noise with it
        self.total = 0.0
