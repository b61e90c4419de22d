"""Trying to refute the bounds: gradient ascent for a sample whose gradient is larger than certified.

For one layer the search maximises ‖output‖, ‖cotangent out‖ and each ‖parameter gradient‖ over inputs, cotangents and
(projected) weights. The gradient of a norm that is linear in its argument, put back on the sphere, is a power
iteration, so where a bound is tight the search finds it. For a network it maximises the parameters' gradients over raw
inputs, targets and, if asked, weights. A ratio above 1 refutes a bound; ratios below 1 prove nothing, but say how tight
it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import MARGIN, Activation, LipschitzLayer
from erlangen.lipschitz.bounds import backpropagate_bounds, output, require_network
from erlangen.lipschitz.inputs import BoundedInput
from erlangen.lipschitz.losses import loss_constant
from erlangen.lipschitz.projection import Projector


class SensitivityError(AssertionError):
    """A bound that does not hold."""


@dataclass(frozen=True)
class SensitivityReport:
    """The largest found / certified ratio of each quantity."""

    subject: str
    ratios: dict[str, float]
    evaluations: int

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)

    def require(self) -> SensitivityReport:
        """Raise `SensitivityError` if any bound was exceeded."""
        for name, ratio in self.ratios.items():
            if not ratio <= 1.0:
                raise SensitivityError(
                    f"{self.subject}: {name} reaches {ratio:.6g} times its certified bound. The bound is wrong; noise "
                    "scaled by it is not private. Correct propagate_input, backpropagate_cotangent or parameter_bound."
                )
        return self

    def __str__(self) -> str:
        wide = max([len(self.subject), *map(len, self.ratios)])
        lines = [f"{self.subject:<{wide}}  found/certified ({self.evaluations} evaluations)"]
        return "\n".join([*lines, *(f"{name:<{wide}}  {ratio:.4f}" for name, ratio in self.ratios.items())])


def check_layer(
    layer: LipschitzLayer, shape: tuple[int, ...], norm: float = 1.0, cotangent: float = 1.0, *,
    steps: int = 30, restarts: int = 4, move_weights: bool = True, seed: int = 0,
) -> SensitivityReport:  # fmt: skip
    """Search one layer on inputs [shape] of norm ≤ ``norm``, cotangents of norm ≤ ``cotangent``; raise if refuted."""
    generator = torch.Generator().manual_seed(seed)
    layer, x_bound = copy.deepcopy(layer).double().train(), Activation(shape, norm)
    out = layer.propagate_input(x_bound)
    bounds = {"output": out.norm, "cotangent": layer.backpropagate_cotangent(x_bound, cotangent)}
    bounds |= layer.parameter_bound(x_bound, cotangent)
    refuse_mixing(layer, shape, generator)
    worst, count = dict.fromkeys(bounds, 0.0), 0
    for quantity in bounds:
        for restart in range(restarts):
            attack = _LayerAttack(copy.deepcopy(layer), quantity, norm, cotangent, move_weights and restart % 2 == 1)
            x = _on_sphere(_first(shape, restart, generator), norm)
            c = _on_sphere(_first(out.shape, restart, generator), cotangent)
            for found in attack.ascend(x, c, steps, damped=restart >= restarts // 2):
                for name, value in found.items():
                    worst[name] = max(worst[name], value / (bounds[name] * MARGIN))
                count += 1
    return SensitivityReport(type(layer).__name__, worst, count).require()


@dataclass
class _LayerAttack:
    layer: LipschitzLayer
    quantity: str
    norm: float
    cotangent: float
    move_weights: bool

    def ascend(self, x: Tensor, c: Tensor, steps: int, damped: bool) -> Iterator[dict[str, float]]:
        self.layer.project()
        for _ in range(steps):
            x, c = x.detach().requires_grad_(), c.detach().requires_grad_()
            found = self._norms(x, c)
            yield {name: float(value.detach()) for name, value in found.items()}
            weights = [p for p in self.layer.parameters() if p.requires_grad] if self.move_weights else []
            slopes = torch.autograd.grad(found[self.quantity], [x, c, *weights], allow_unused=True)
            x, c = _climb(x, slopes[0], self.norm, damped), _climb(c, slopes[1], self.cotangent, damped)
            _move(weights, slopes[2:], self.layer.project)

    def _norms(self, x: Tensor, c: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        named = {n: p for n, p in self.layer.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(y, [x, *named.values()], c, create_graph=True, allow_unused=True)
        found = {"output": _norm(y), "cotangent": _norm(grads[0])}
        return found | {name: _norm(g) for name, g in zip(named, grads[1:])}


def check_sensitivity(
    network: nn.Module, loss: Any, *, steps: int = 20, restarts: int = 6, move_weights: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.float64, certify_every: int = 1,
) -> SensitivityReport:  # fmt: skip
    """Search a whole network for a sample whose gradient exceeds Algorithm 1's Δ; raise if one is found.

    The network is copied and projected; ``move_weights`` lets the search choose the weights too, which are certified in
    full every ``certify_every`` moves and by the triangle inequality in between, as in training. Hostile inputs (zero,
    huge, NaN, ±∞) are tried as well: their gradients must be finite and within bounds.
    """
    generator = torch.Generator().manual_seed(seed)
    net = require_network(copy.deepcopy(network).to("cpu", dtype).train())
    logits = output(net)
    bounds = backpropagate_bounds(net, loss_constant(loss, logits.shape[-1], logits.norm))
    first = net[0]
    assert isinstance(first, BoundedInput)
    refuse_mixing(net, first.shape, generator)
    project = Projector(net, certify_every)
    project()
    attack = _NetworkAttack(net, loss, dict(bounds), bounds.total, project)
    for x in _hostile(first.shape, dtype):
        attack.measure(x, 0)
    focus, radius = [None, *bounds], first.reach
    for restart in range(restarts):
        x = _on_sphere(_first(first.shape, restart, generator), radius).to(dtype)
        target = int(torch.randint(logits.shape[-1], (), generator=generator))
        attack.ascend(x, target, focus[restart % len(focus)], steps, radius, move_weights and restart % 2 == 1)
    return SensitivityReport(type(network).__name__, attack.worst, attack.count).require()


class _NetworkAttack:
    def __init__(
        self, net: LipschitzLayer, loss: Any, bounds: dict[str, float], total: float, project: Callable[[], None]
    ) -> None:
        self.net, self.loss, self.bounds, self.total, self.project = net, loss, bounds, total, project
        self.named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        self.worst, self.count = {**dict.fromkeys(bounds, 0.0), "all": 0.0}, 0

    def measure(self, x: Tensor, target: int) -> dict[str, Tensor]:
        """found/certified of every parameter for one sample."""
        if isinstance(self.loss, (int, float)):  # only a constant is known: a linear functional of that norm
            value = self.loss * self.net(x)[:, target].sum()
        else:
            value = self.loss(self.net(x), torch.tensor([target]))
        grads = torch.autograd.grad(value, list(self.named.values()), create_graph=True, allow_unused=True)
        norms = {name: _norm(g) for name, g in zip(self.named, grads)}
        ratios = {name: norm / self.bounds[name] for name, norm in norms.items()}
        ratios["all"] = torch.stack([n.square() for n in norms.values()]).sum().sqrt() / self.total
        for name, ratio in ratios.items():
            found = float(ratio.detach())
            self.worst[name] = max(self.worst[name], math.inf if math.isnan(found) else found)
        self.count += 1
        return ratios

    def ascend(self, x: Tensor, target: int, focus: str | None, steps: int, radius: float, move_weights: bool) -> None:
        weights = list(self.named.values()) if move_weights else []
        for _ in range(steps):
            x = x.detach().requires_grad_()
            ratios = self.measure(x, target)
            goal = ratios[focus] if focus else torch.stack([r.square() for r in ratios.values()]).sum()
            if not goal.requires_grad:
                return
            slopes = torch.autograd.grad(goal, [x, *weights], allow_unused=True)
            x = _climb(x, slopes[0], radius, damped=True)
            _move(weights, slopes[1:], self.project)


def check_loss(
    loss: Callable[[Tensor, Tensor], Tensor], classes: int, constant: float | None = None, logit_bound: float = 30.0,
    *, steps: int = 30, restarts: int = 12, seed: int = 0,
) -> SensitivityReport:  # fmt: skip
    """Search a loss for a gradient in the logits above its declared constant, and for dependence on other rows."""
    generator = torch.Generator().manual_seed(seed)
    declared = loss_constant(loss, classes, logit_bound) if constant is None else constant
    batch = torch.randn(6, classes, dtype=torch.float64, generator=generator)
    targets = torch.tensor([i % min(2, classes) for i in range(6)])
    whole, fewer = _loss_gradient(loss, batch, targets), _loss_gradient(loss, batch[:5], targets[:5])
    scale = 6 / 5 if getattr(loss, "reduction", "mean") == "mean" else 1.0
    if not torch.allclose(whole[0] * scale, fewer[0], rtol=1e-6, atol=1e-9):
        raise SensitivityError(f"the loss {type(loss).__name__} mixes samples: removing one changes another's term")
    worst, count = 0.0, 0
    for restart in range(restarts):
        radius = logit_bound * 4.0 ** -(restart % 6)
        y = _on_sphere(torch.randn(1, classes, dtype=torch.float64, generator=generator), radius)
        target = torch.randint(classes, (1,), generator=generator)
        for _ in range(steps):
            y = y.detach().requires_grad_()
            g = torch.autograd.grad(loss(y, target), y, create_graph=True)[0]
            worst, count = max(worst, float(_norm(g).detach()) / (declared * MARGIN)), count + 1
            y = _climb(y, _slope(g, y), radius, damped=True)
    return SensitivityReport(type(loss).__name__, {"constant": worst}, count).require()


def _slope(g: Tensor, y: Tensor) -> Tensor:
    """The slope of ‖g‖; where it is flat or cannot be had, g itself: uphill the loss is as wrong as it can be."""
    try:
        slope = torch.autograd.grad(_norm(g), y, allow_unused=True)[0] if g.requires_grad else None
    except RuntimeError:  # some of torch's losses have no second derivative
        slope = None
    return g.detach() if slope is None or not bool(slope.abs().max() > 0) else slope


def _loss_gradient(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(logits, targets), logits)[0]


def refuse_mixing(layer: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> None:
    """Raise if the output of one row depends on another."""
    dtype = next((p.dtype for p in layer.parameters()), torch.float64)
    x = torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        together, alone = layer(x)[:1], layer(x[:1])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise SensitivityError(f"{type(layer).__name__} mixes samples: a record's output changes with the others")


def _hostile(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    values = [0.0, 1e-38, 1.0, 1e30, -1e38, math.nan, math.inf, -math.inf]
    inputs = [torch.full((1, *shape), value, dtype=dtype) for value in values]
    inputs.append(torch.randn(1, *shape).to(dtype))
    inputs[-1].view(-1)[0] = math.nan
    return inputs


def _first(shape: tuple[int, ...], restart: int, generator: torch.Generator) -> Tensor:
    """Starting points of several kinds: random, flat, a spike on a little noise, smooth."""
    noise = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    kind = restart % 3
    if kind == 1:
        return 1.0 + 0.01 * noise
    if kind == 2:
        noise = 1e-3 * noise
        noise[0].view(-1)[sum(n // 2 * math.prod(shape[i + 1 :]) for i, n in enumerate(shape))] += 1.0
    return noise


def _climb(x: Tensor, slope: Tensor | None, radius: float, damped: bool) -> Tensor:
    """Towards the slope, on the sphere of the given radius: all the way (a power iteration), or half of it."""
    if slope is None or not bool(slope.isfinite().all()) or not bool(slope.abs().max() > 0):
        return x.detach()
    step = _on_sphere(slope.detach(), radius)
    return _on_sphere(0.5 * x.detach() + step, radius) if damped else step


def _move(weights: list[nn.Parameter], slopes: tuple[Tensor | None, ...], project: Callable[[], None]) -> None:
    with torch.no_grad():
        for p, slope in zip(weights, slopes):
            if slope is not None and bool(slope.isfinite().all()) and bool(slope.abs().max() > 0):
                p.add_(slope * (0.3 * (p.norm() + 1e-2) / slope.norm()))
    if weights:
        project()


def _on_sphere(x: Tensor, radius: float) -> Tensor:
    return x * (radius / x.norm().clamp(min=1e-30))


def _norm(t: Tensor | None) -> Tensor:
    """‖t‖ with a gradient that is zero, not NaN, at zero."""
    if t is None:
        return torch.zeros((), dtype=torch.float64)
    return t.double().square().sum().clamp(min=1e-60).sqrt() if t.requires_grad else t.double().norm()
