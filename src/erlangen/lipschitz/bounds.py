"""Algorithm 1: backpropagation for bounds. From the input's radius X₀ and the loss's constant L to one Δ per parameter.

    for d = 1 … D:   X_d ← max ‖f_d(θ_d, x)‖ over ‖x‖ ≤ X_{d−1}        (propagate_input)
    G ← L
    for d = D … 1:   Δ_d ← G · max ‖∂f_d/∂θ_d‖                           (parameter_bound)
                     G ← G · max ‖∂f_d/∂x‖                               (backpropagate_cotangent)

The maxima are over all weights that projection allows, so the Δ_d do not move during training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from erlangen.lipschitz.base import MARGIN, ROUNDOFF, Activation
from erlangen.lipschitz.compose import Sequential
from erlangen.lipschitz.inputs import BoundedInput
from erlangen.lipschitz.watch import refuse_strangers


@dataclass(frozen=True)
class Row:
    """One parameter: its layer, number of entries, and the bound Δ on one sample's gradient."""

    name: str
    layer: str
    size: int
    bound: float


@dataclass(frozen=True)
class Sensitivities(Mapping[str, float]):
    """Δ by parameter name; `str()` is a table."""

    rows: tuple[Row, ...]
    loss_constant: float
    logit_bound: float

    def __getitem__(self, name: str) -> float:
        for row in self.rows:
            if row.name == name:
                return row.bound
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (row.name for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> float:
        """Δ of the whole gradient: √ΣΔ_d²."""
        return math.sqrt(sum(row.bound**2 for row in self.rows))

    def __str__(self) -> str:
        wide = max([len("parameter"), *(len(row.name) for row in self.rows)])
        kind = max([len("layer"), *(len(row.layer) for row in self.rows)])
        line = f"{{:<{wide}}}  {{:<{kind}}}  {{:>9}}  {{:>11}}  {{:>6}}"
        out = [line.format("parameter", "layer", "entries", "bound", "share")]
        for row in self.rows:
            share = f"{100 * row.bound**2 / self.total**2:.1f}%"
            out.append(line.format(row.name, row.layer, row.size, f"{row.bound:.5g}", share))
        out.append(line.format("all", "", sum(row.size for row in self.rows), f"{self.total:.5g}", ""))
        return "\n".join(out)


def start(precision: str = "fp32") -> Activation:
    """What enters `BoundedInput`: anything."""
    if precision not in ROUNDOFF:
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(ROUNDOFF)}")
    return Activation((), math.inf, ROUNDOFF[precision])


def require_network(module: nn.Module) -> Sequential:
    """The module, if bounds can be propagated through it; else an error that says what to change."""
    if not isinstance(module, Sequential):
        raise TypeError(
            f"clipless training needs a Lipschitz network, not {type(module).__name__}: build one with "
            "erlangen.lipschitz.Sequential, or choose one of erlangen.models.lipschitz"
        )
    if not len(module) or not isinstance(module[0], BoundedInput):
        first = type(module[0]).__name__ if len(module) else "nothing"
        raise ValueError(f"the network begins with {first}: its first layer must be BoundedInput, to bound the inputs")
    refuse_strangers(module)
    return module


def output(network: nn.Module, precision: str = "fp32") -> Activation:
    """Shape and norm bound of the logits."""
    return require_network(network).propagate_input(start(precision))


def backpropagate_bounds(network: nn.Module, loss_constant: float, precision: str = "fp32") -> Sensitivities:
    """A certified Δ for every trainable parameter; refuses a network that has one without.

    A parameter used in several places receives the sum of their gradients, hence the sum of their bounds.
    """
    network = require_network(network)
    logits = network.propagate_input(start(precision))
    bounds = network.parameter_bound(start(precision), loss_constant * (1.0 + ROUNDOFF[precision]))
    every = dict(network.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
    total = dict.fromkeys(names.values(), 0.0)
    for path, bound in bounds.items():
        if path in every and id(every[path]) in names:
            total[names[id(every[path])]] += bound
    unbounded = [name for name, bound in total.items() if not (math.isfinite(bound) and bound > 0)]
    if unbounded:
        raise ValueError(
            f"no finite, positive bound for the trainable parameter(s) {', '.join(unbounded)}: each needs an entry in "
            "its layer's parameter_bound (re-parametrised weights have none: constrain by projection), or "
            "requires_grad=False"
        )
    modules = dict(network.named_modules())
    kinds = {name: type(modules[name.rpartition(".")[0]]).__name__ for name in total}
    rows = tuple(Row(name, kinds[name], every[name].numel(), bound * MARGIN) for name, bound in total.items())
    return Sensitivities(rows, loss_constant, logits.norm)


def lipschitz_constant(network: nn.Module) -> float:
    """Of the logits in the raw input; ∞ if the input layer has none (sphere projection, HSV)."""
    network = require_network(network)
    return network.jacobian_bound(start()) * MARGIN
