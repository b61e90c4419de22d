"""Broken layer rules and Lipschitz layers, each a few lines away from a sound one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from erlangen.audit.layers import Example
from erlangen.gradients.pieces import Dense, Outer
from erlangen.gradients.registry import _RULES, registered
from erlangen.gradients.tape import Tape
from erlangen.lipschitz import SpectralConv2d, SpectralDense


class NormWithoutBias(nn.Linear):
    """Its rule forgets the bias."""


class MeanOverTokens(nn.Linear):
    """Its rule averages over tokens, where the gradient is their sum."""


def forgets_bias(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)))

    return tape.tap(out, (input,), (weight, bias), pieces)


def averages_tokens(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)) / d.shape[1])
        yield bias, Dense(d.flatten(1, -2).mean(1))

    return tape.tap(out, (input,), (weight, bias), pieces)


class NoCrossTerms(Outer):
    """Norms as if tokens were orthogonal."""

    def norms_squared(self, weight: Any = None) -> Tensor:
        return (self.a.square().sum(2) * self.d.square().sum(2)).sum(1)


def adds_up_norms(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        a, c = (t.flatten(1, -2).unflatten(0, (-1, views)).flatten(1, 2) for t in (saved[0], d))
        yield weight, NoCrossTerms(a, c)
        yield bias, Dense(c.sum(1))

    return tape.tap(out, (input,), (weight, bias), pieces)


def with_rule(kind: type[nn.Linear], rule: Any) -> Example:
    """A linear layer of its own type with this rule; None is the library's."""

    class Layer(kind):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__(5, 3)
            _RULES[type(self)] = rule or registered()[nn.Linear]

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight, self.bias)

    return Example(Layer, lambda rows: torch.randn(rows, 4, 5, generator=torch.Generator().manual_seed(rows)))


class BiasBoundWithoutArea(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"bias": g}


class PowerIterationNorm(SpectralDense):
    def symbols(self) -> None:
        """Not certified together with the others."""

    def certified_norm(self) -> Tensor:
        v = torch.ones(self.in_features, dtype=torch.float64)
        u = self.weight.detach().double() @ (v / v.norm())
        return (self.weight.detach().double().T @ (u / u.norm().clamp(min=1e-30))).norm()


class OverlapForgotten(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"weight": g * x.norm}
