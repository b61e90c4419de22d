"""Public training of the transfer table: how it begins, and how long its steps are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import erlangen.experiments.pretrain as module
from erlangen.data.base import Dataset
from erlangen.experiments.pretrain import begin_as_identities, factor
from erlangen.models import make_model
from erlangen.models.gredp import BasicBlock


def test_residual_branches_begin_at_zero_and_learn() -> None:
    torch.manual_seed(0)
    network = begin_as_identities(make_model("resnet20", (3, 32, 32), 10))
    block = next(m for m in network.modules() if isinstance(m, BasicBlock))
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(block(x), F.relu(x))
    block(x).sum().backward()
    assert bool(block.norm2.weight.grad.any()), "zero is where they begin, not where they stay"


def test_the_rate_goes_up_and_then_down() -> None:
    values = [factor(k, 1000) for k in range(1000)]
    assert max(values) == pytest.approx(1.0, abs=0.01)
    assert values[0] < 0.05
    assert values[-1] < 1e-4
    assert values.index(max(values)) in range(40, 60)


def test_public_and_private_records_are_apart_and_five_classes_stay_unseen(monkeypatch) -> None:
    x, y = np.arange(200, dtype=np.float32)[:, None], np.arange(200) // 2 % 10
    monkeypatch.setattr(module, "load", lambda name: Dataset(name, x, y, -x, y, 10))
    public, five, private = (make() for make in (module.first_half, module.first_half_five, module.second_half))
    assert not {*public.x_train.flat} & {*private.x_train.flat}
    assert len(public) + len(private) == 200
    assert {*five.x_train.flat} == {float(v) for v, label in zip(public.x_train.flat, public.y_train, strict=True) if label < 5}
    assert {*five.y_train} == {*five.y_test} == set(range(5))
    assert {*private.y_train} == {*private.y_test} == set(range(10))
    assert five.classes == 10, "the private network has ten outputs"
