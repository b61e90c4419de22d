"""Losses with a known Lipschitz constant in the logits, and nothing that looks at the batch.

Each loss is a mean (or sum) of per-sample terms ℓ(y, t) with ‖∂ℓ/∂y‖ ≤ `constant(classes, logit_bound)` for every
target. A target that makes no sense (a class that does not exist, a number that is not finite) contributes nothing.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.spelling import hint, refuse_unknown


class LipschitzLoss(nn.Module):
    """Subclasses write `per_sample` and `constant`."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        self.reduction = reduction

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        """A bound on the gradient norm of one term, for logits of norm ≤ ``logit_bound``."""
        raise NotImplementedError

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        """[n] losses of valid targets."""
        raise NotImplementedError

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        valid, target = sensible(logits, target)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = torch.where(valid, self.per_sample(precise, target), 0.0)
        return losses.sum() / max(len(losses), 1) if self.reduction == "mean" else losses.sum()


def sensible(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets can be used, and the targets with the others replaced by something harmless."""
    if target.is_floating_point():
        valid = target.flatten(1).isfinite().all(1)
        return valid, torch.where(valid.view(-1, *[1] * (target.ndim - 1)), target, 0.0)
    valid = (target >= 0) & (target < logits.shape[1])
    return valid, torch.where(valid, target, 0)


class CrossEntropy(LipschitzLoss):
    """CE(τy)/τ: gradient p − e_t, of norm ≤ √2·(1 − p_t) ≤ √2. With ``scaled=False``, CE(τy): τ times that.

    Logits of norm ≤ Y differ by at most √2·Y, so p_t ≥ 1/(1 + (K−1)e^{√2τY}): a tighter constant when τY is small.
    """

    def __init__(self, temperature: float = 1.0, scaled: bool = True, reduction: str = "mean") -> None:
        super().__init__(reduction)
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature is {temperature!r}; τ must be positive and finite")
        self.temperature, self.scaled = float(temperature), scaled

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        exponent = math.sqrt(2) * self.temperature * logit_bound
        least = 1.0 / (1.0 + (classes - 1) * math.exp(exponent)) if exponent < 700 else 0.0
        return math.sqrt(2) * (1.0 - least) * (1.0 if self.scaled else self.temperature)

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits * self.temperature, target, reduction="none")
        return loss / self.temperature if self.scaled else loss


class KCosine(LipschitzLoss):
    """1 − y_t/max(‖y‖, K): gradient norm ≤ 1/K (outside the ball the radial part vanishes, and ‖y‖ ≥ K)."""

    def __init__(self, k: float, reduction: str = "mean") -> None:
        super().__init__(reduction)
        if not (math.isfinite(k) and k > 0):
            raise ValueError(f"k is {k!r}; it must be positive and finite")
        self.k = float(k)

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        return 1.0 / self.k

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        size = torch.sqrt(logits.square().sum(1).clamp(min=self.k**2))  # clamp: no 0/0 in the gradient of a zero vector
        return 1.0 - logits.gather(1, target[:, None])[:, 0] / size


class MulticlassHinge(LipschitzLoss):
    """Margins m against the other classes. ``kind="max"`` (Crammer–Singer): max(0, m − y_t + max_{j≠t} y_j), √2.

    ``"sum"`` is Σ_{j≠t} max(0, m − y_t + y_j), √(K(K−1)); ``"mean"`` is that divided by K, as
    ``torch.nn.MultiMarginLoss`` has it.
    """

    def __init__(self, margin: float = 1.0, kind: str = "max", reduction: str = "mean") -> None:
        super().__init__(reduction)
        if kind not in ("max", "sum", "mean"):
            raise ValueError(f"kind is {kind!r}; choose 'max', 'sum' or 'mean'")
        self.margin, self.kind = float(margin), kind

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        total = math.sqrt(classes * (classes - 1))
        return {"max": math.sqrt(2), "sum": total, "mean": total / classes}[self.kind]

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        own = F.one_hot(target, logits.shape[1]).bool()
        gaps = self.margin - logits.gather(1, target[:, None]) + logits
        if self.kind == "max":
            return gaps.masked_fill(own, -math.inf).amax(1).relu()
        total = gaps.relu().masked_fill(own, 0.0).sum(1)
        return total / logits.shape[1] if self.kind == "mean" else total


class HingeKR(LipschitzLoss):
    """Per sample: (mean_{j≠t} y_j − y_t) + α·hinge. Constant √(K/(K−1)) + α·√2.

    The usual Kantorovich–Rubinstein loss divides by the number of samples of each class *in the batch*: one record then
    changes the others' terms, and there is no per-sample constant. This one divides by nothing.
    """

    def __init__(self, alpha: float = 10.0, margin: float = 1.0, reduction: str = "mean") -> None:
        super().__init__(reduction)
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ValueError(f"alpha is {alpha!r}; it must be finite and not negative")
        self.alpha, self.hinge = float(alpha), MulticlassHinge(margin)

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        return math.sqrt(classes / (classes - 1)) + self.alpha * math.sqrt(2)

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        own = logits.gather(1, target[:, None])[:, 0]
        others = (logits.sum(1) - own) / (logits.shape[1] - 1)
        return others - own + self.alpha * self.hinge.per_sample(logits, target)


class MAE(LipschitzLoss):
    """Σ|y − t| over K outputs (√K), or its mean over them (1/√K); classes become one-hot targets."""

    def __init__(self, mean: bool = True, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.mean = mean

    def constant(self, classes: int, logit_bound: float = math.inf) -> float:
        return 1.0 / math.sqrt(classes) if self.mean else math.sqrt(classes)

    def per_sample(self, logits: Tensor, target: Tensor) -> Tensor:
        wanted = target if target.is_floating_point() else F.one_hot(target, logits.shape[1]).to(logits.dtype)
        distance = (logits - wanted).abs().flatten(1)
        return distance.mean(1) if self.mean else distance.sum(1)


LOSSES = {"cross-entropy": CrossEntropy, "cosine": KCosine, "hinge": MulticlassHinge, "hinge-kr": HingeKR, "mae": MAE}


def make_loss(loss: Any) -> Any:
    """A loss from its name, or from a dict {"name": …, options}; anything else is returned as it is."""
    options = dict(loss) if isinstance(loss, dict) else {"name": loss}
    name = options.pop("name", None)
    if not isinstance(name, str):
        return loss
    if name not in LOSSES:
        raise ValueError(f"loss is {name!r}; choose one of {', '.join(LOSSES)}.{hint(name, LOSSES)}")
    refuse_unknown(f"loss {name!r}", options, list(inspect.signature(LOSSES[name]).parameters))
    return LOSSES[name](**options)


def loss_constant(loss: Any, classes: int, logit_bound: float = math.inf) -> float:
    """The declared constant of a loss; torch's own losses are known where their mean does not depend on the batch."""
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(f"the loss's Lipschitz constant is {loss!r}; it must be positive and finite")
        return float(loss)
    if isinstance(loss, LipschitzLoss):
        return loss.constant(classes, logit_bound)
    if getattr(loss, "weight", None) is not None:
        raise ValueError(
            f"{type(loss).__name__} with class weights divides by the weights found in the batch, so one record "
            "changes the others' terms: drop the weights, or use a loss of erlangen.lipschitz"
        )
    if type(loss) is nn.CrossEntropyLoss:
        if loss.reduction == "mean":
            raise ValueError(
                f"CrossEntropyLoss takes its mean over the targets that are not {loss.ignore_index} (ignore_index), so one "
                "record changes the others' terms: use erlangen.lipschitz.CrossEntropy(), the same loss over all rows, or "
                "reduction='sum'"
            )
        return CrossEntropy().constant(classes, logit_bound if loss.label_smoothing == 0 else math.inf)
    if type(loss) is nn.MultiMarginLoss and loss.p == 1:
        return MulticlassHinge(kind="mean").constant(classes)
    raise ValueError(
        f"the loss {type(loss).__name__} has no declared Lipschitz constant, so the sensitivity is unknown: use a loss "
        f"of erlangen.lipschitz ({', '.join(LOSSES)}), or give the constant itself if you can prove one per sample"
    )
