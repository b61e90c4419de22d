"""The step benchmark: what stands beside our private step is DP-SGD too, on steerable networks as well."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.equivariant import (
    EquivariantGroupNorm,
    EquivariantSequential,
    SteerableConv2d,
    dihedral,
    regular_fields,
    trivial_fields,
)
from erlangen.gradients import registry
from erlangen.gradients.attach import plan
from erlangen.gradients.fallback import functional
from tests.gradients.reference import assert_same, one_by_one, recorded
from tests.scripts import script

bench = script("step")


def steerable() -> nn.Module:
    torch.manual_seed(0)
    regular = regular_fields(dihedral(4), 2)
    conv = SteerableConv2d(trivial_fields(dihedral(4), 1), regular, 3, padding=1, standardise=True)
    features = EquivariantSequential(conv, EquivariantGroupNorm(regular))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def test_functional_steps_are_those_of_dp_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """θ − lr·Σ min(1, 1/‖g_i‖)·g_i/n, one record at a time; the noise, here zero, is drawn once for every parameter."""
    drawn: list[torch.Size] = []
    monkeypatch.setattr(torch, "randn_like", lambda p: drawn.append(p.shape) or torch.zeros_like(p))
    module, x, y = steerable().double(), torch.randn(4, 1, 6, 6).double() * 5, torch.tensor([0, 1, 2, 0])
    criterion, before = nn.CrossEntropyLoss(), [p.detach().clone() for p in module.parameters()]
    expected = [torch.zeros_like(p) for p in before]
    for one, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(criterion(module(one[None]), label[None]), list(module.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, g in zip(expected, gradients, strict=True):
            total += g * min(1.0, float(1 / norm)) / 4
    bench._functional(module, torch.optim.SGD(module.parameters(), lr=0.5), criterion, x, y)()
    assert drawn == [p.shape for p in before]
    for p, old, g in zip(module.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.5 * g, rtol=1e-10, atol=1e-12)


def test_the_fallback_has_no_rule_for_steerable_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the gradients of one record at a time, as the rules do."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    assert not any(rule is functional for _, _, rule in plan(steerable()))
    expected = one_by_one(steerable().double(), (x,))
    bench.forget_our_rules()
    assert sum(rule is functional for _, _, rule in plan(steerable())) == 2
    assert_same(recorded(steerable().double(), (x,)), expected)


def test_every_method_is_built_for_the_networks_it_can_train() -> None:
    assert bench.METHODS[:4] == ("plain", "joined", "erlangen", "functional")
    for method in bench.METHODS[:4]:
        bench.stepper(method, "lenet", 2, "auto")()
