"""Models stacked into one: every row has the output and the gradient of its own model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.circulant import CirculantConv2d, CirculantLinear
from erlangen.equivariant import (
    EquivariantGroupNorm,
    EquivariantSequential,
    FourierNonlinearity,
    NormNonlinearity,
    SteerableConv2d,
    cyclic,
    dihedral,
    fields,
    regular_fields,
    so2,
    spectral,
    trivial_fields,
)
from erlangen.training.stacked import Stack
from tests.gradients.reference import one_by_one


def build(name: str) -> tuple[nn.Module, int]:
    c4, d4 = cyclic(4), dihedral(4)
    band = fields(spectral(so2(), 1), 2)
    made = {
        "plain": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False),
            nn.Flatten(), nn.Linear(27, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False),
        ),
        "circulant": lambda: nn.Sequential(
            CirculantConv2d(2, 5, 3, block_size=3, padding=1), nn.ReLU(),
            CirculantConv2d(5, 4, 3, block_size=2, stride=2, bias=False),
            nn.Flatten(), CirculantLinear(36, 10, 4), nn.ReLU(), CirculantLinear(10, 3, 3, bias=False),
        ),
        "grouped": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, padding=1), nn.PReLU(), nn.Flatten(), nn.Linear(256, 3)),
        "standardised": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(d4, 2), regular_fields(d4, 2), 3, standardise=True, padding=1),
            EquivariantGroupNorm(regular_fields(d4, 2), 1),
            SteerableConv2d(regular_fields(d4, 2), regular_fields(d4, 1), 3, basis="pixel", standardise=True),
        ),
        "per element": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(c4, 2), regular_fields(c4, 2), 5, stride=2, bias=False),
            EquivariantGroupNorm(regular_fields(c4, 2), per_element=True),
        ),
        "SO(2)": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(so2(), 2), band, 3, padding=1),
            FourierNonlinearity(so2(), 1, 2, nn.Mish()),
            NormNonlinearity(band),
        ),
    }[name]()  # fmt: skip
    return (
        made
        if isinstance(made, nn.Sequential) and name in ("plain", "grouped", "circulant")
        else nn.Sequential(made, _Head())
    ), 2


class _Head(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


def cross_entropy_of(labels):
    rows = iter(labels)
    return lambda out: nn.functional.cross_entropy(out, next(rows).view(1), reduction="none")


@pytest.mark.parametrize("name", ["plain", "grouped", "standardised", "per element", "SO(2)", "circulant"])
def test_every_row_has_the_gradient_of_its_own_model(name):
    torch.manual_seed(0)
    models = [build(name)[0].double() for _ in range(3)]
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    x, y = torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    stack = Stack(models, 2)
    gradients = stack.dense(stack.backward(stack(x), y))
    for k, model in enumerate(models):
        rows = slice(2 * k, 2 * k + 2)
        torch.testing.assert_close(stack(x)[rows], model(x[rows]), rtol=1e-8, atol=1e-10)
        want = one_by_one(model, (x[rows],), cross_entropy_of(y[rows]))
        flat = torch.cat([want[n].flatten(1) for n in stack.shapes], 1)
        assert (gradients[k] - flat).norm() / flat.norm() < 1e-5  # the loss is taken in single precision


def test_frozen_parameters_stay_and_have_no_gradient():
    torch.manual_seed(0)
    models = [build("plain")[0] for _ in range(2)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        model[1].weight.fill_(2.0)
    stack = Stack(models, 3)
    assert not any(name.startswith(("0.", "1.")) for name in stack.shapes)
    x = torch.randn(6, 2, 8, 8)
    torch.testing.assert_close(stack(x)[:3], models[0](x[:3]), rtol=1e-4, atol=1e-5)
