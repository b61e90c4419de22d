"""Measures on *public* test data. The same numbers on private records would be releases of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.deploy.averaged import rows_at_once


def evaluate(module: nn.Module, x: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    """The `scores` of a module in evaluation mode."""
    return scores(answers(module, x), y, classes)


@torch.no_grad()
def answers(module: nn.Module, x: Tensor) -> Tensor:
    """The logits of a module in evaluation mode, in float32."""
    was_training = module.training
    module.eval()
    logits = torch.cat([module(part).float() for part in x.split(rows_at_once(module, 1024))])
    module.train(was_training)
    return logits


def scores(logits: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    """Accuracy, loss, Brier score (mean over classes and samples) and expected calibration error (15 bins)."""
    p = logits.softmax(1)
    confidence, prediction = p.max(1)
    right = (prediction == y).float()
    brier = (p - F.one_hot(y, classes)).square().mean()
    loss = F.cross_entropy(logits, y)
    return {
        "test_accuracy": float(right.mean()),
        "test_loss": float(loss) if math.isfinite(float(loss)) else float("inf"),
        "brier": float(brier),
        "ece": calibration_error(confidence, right),
    }


def calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Σ_b (n_b/n)·|accuracy_b − confidence_b| over equal-width bins."""
    index = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(index, minlength=bins).clamp(min=1).to(confidence)
    gap = torch.bincount(index, right - confidence, minlength=bins) / count
    return float((gap.abs() * torch.bincount(index, minlength=bins)).sum() / max(len(confidence), 1))


def near_zero(tensors: Iterable[Tensor], threshold: float = 1e-3) -> float:
    """The share of entries below ``threshold`` in magnitude: 1 − ℓ0^ε/d. Public for released weights, not for gradients."""
    flat = torch.cat([t.detach().flatten().float() for t in tensors])
    return float((flat.abs() < threshold).float().mean())
