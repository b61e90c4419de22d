"""Losses: declared constants under attack, batch-normalised losses rejected, senseless targets harmless."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erlangen.lipschitz import (
    MAE,
    CrossEntropy,
    HingeKR,
    KCosine,
    LipschitzLoss,
    MulticlassHinge,
    SensitivityError,
    check_loss,
    loss_constant,
)
from erlangen.lipschitz.losses import make_loss

LOSSES = [
    CrossEntropy(1.0), CrossEntropy(8.0), CrossEntropy(8.0, scaled=False), KCosine(2.0), MulticlassHinge(),
    MulticlassHinge(kind="sum"), MulticlassHinge(kind="mean"), HingeKR(), MAE(), MAE(mean=False),
    CrossEntropy(3.0, reduction="sum"),
]  # fmt: skip


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda l: type(l).__name__)
def test_constants_hold_and_are_tight(loss, classes):
    report = check_loss(loss, classes)
    assert 0.9 <= report.worst <= 1.0


def test_small_logits_tighten_cross_entropy():
    loss = CrossEntropy(1.0)
    assert loss.constant(2, 0.5) < 0.75 * math.sqrt(2)
    assert check_loss(loss, 2, logit_bound=0.5).worst >= 0.9
    assert loss.constant(10) == pytest.approx(math.sqrt(2))


class WrongCosine(KCosine):
    """A published constant: 1/K² (here K = 2, where that is half of the truth)."""

    def constant(self, classes, logit_bound=math.inf):
        return 1.0 / self.k**2


class BatchKR(LipschitzLoss):
    """Kantorovich–Rubinstein normalised by the number of samples of each class in the batch."""

    def constant(self, classes, logit_bound=math.inf):
        return 10.0

    def per_sample(self, logits, target):
        own = F.one_hot(target, logits.shape[1]).to(logits.dtype)
        counts = own.sum(0).clamp(min=1)
        return (-(own * logits) / counts).sum(1) + ((1 - own) * logits / (len(target) - counts).clamp(min=1)).sum(1)


def test_wrong_losses_are_caught():
    with pytest.raises(SensitivityError, match="certified bound"):
        check_loss(WrongCosine(2.0), 10)
    with pytest.raises(SensitivityError, match="mixes samples"):
        check_loss(BatchKR(), 10)
    with pytest.raises(SensitivityError, match="certified bound"):
        check_loss(CrossEntropy(4.0, scaled=False), 10, constant=math.sqrt(2))


def test_torch_losses_have_constants_or_a_reason():
    assert loss_constant(nn.CrossEntropyLoss(reduction="sum"), 10) == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="ignore_index"):
        loss_constant(nn.CrossEntropyLoss(), 10)
    assert check_loss(nn.MultiMarginLoss(), 10).worst >= 0.9
    with pytest.raises(ValueError, match="class weights"):
        loss_constant(nn.CrossEntropyLoss(weight=torch.ones(10)), 10)
    with pytest.raises(ValueError, match="no declared Lipschitz constant"):
        loss_constant(nn.MSELoss(), 10)
    with pytest.raises(ValueError, match="positive and finite"):
        loss_constant(math.inf, 10)


def test_a_mean_over_some_of_the_targets_depends_on_the_batch_and_ours_does_not():
    """One ignored label more, and torch's mean weighs every other record anew."""
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def own_term(loss, targets):
        x = logits.clone().requires_grad_()
        return 3 * torch.autograd.grad(loss(x, torch.tensor(targets)), x)[0][0]

    for loss, same in ((nn.CrossEntropyLoss(), False), (CrossEntropy(), True)):
        assert torch.allclose(own_term(loss, [1, 2, 3]), own_term(loss, [1, 2, -100])) is same


def test_names_make_losses():
    assert make_loss({"name": "cross-entropy", "temperature": 3.0}).temperature == 3.0
    assert make_loss(1.5) == 1.5
    with pytest.raises(ValueError, match="choose one of"):
        make_loss("mse")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda l: type(l).__name__)
def test_senseless_targets_contribute_nothing(loss):
    logits = torch.randn(4, 5, requires_grad=True)
    loss(logits, torch.tensor([1, -7, 99, 2])).backward()
    assert bool(logits.grad.isfinite().all())
    assert float(logits.grad[1].norm()) == float(logits.grad[2].norm()) == 0.0
    assert float(loss(logits[:0], torch.zeros(0, dtype=torch.long))) == 0.0


def test_a_target_that_is_not_finite_contributes_nothing():
    logits = torch.randn(2, 3, requires_grad=True)
    MAE()(logits, torch.tensor([[0.0, math.nan, 1.0], [0.0, 0.0, 1.0]])).backward()
    assert float(logits.grad[0].norm()) == 0.0
    assert float(logits.grad[1].norm()) > 0.0


def test_zero_logits_have_finite_gradients():
    for loss in LOSSES:
        logits = torch.zeros(2, 4, requires_grad=True)
        loss(logits, torch.tensor([0, 3])).backward()
        assert bool(logits.grad.isfinite().all())
