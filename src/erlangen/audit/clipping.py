"""Clipping rules: Σ_groups (w·‖g‖)² ≤ C² for every norm that floating point knows, and side queries that are paid for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from erlangen.audit.flow import TOLERANCE
from erlangen.audit.verdict import Finding, failed, passed
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms.clipping import ClippingRule
from erlangen.mechanisms.gaussian import GaussianMechanism

MakeRule = Callable[[float], ClippingRule]
NAMES = ["first", "second", "third"]


def _norms(groups: int, bound: float, dtype: torch.dtype) -> torch.Tensor:
    """Zero, denormal, tiny, around C, huge; then random sizes over the whole exponent range.

    Norms come as roots of squared norms, so none is above √max: beyond, the square is infinite and the record is dropped.
    """
    info = torch.finfo(dtype)
    largest = math.sqrt(info.max)
    edge = torch.tensor(bound, dtype=dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    special = [0.0, 5e-324 if dtype == torch.float64 else 1e-45, info.tiny, info.eps, float(torch.nextafter(edge, -infinity)),
               bound, float(torch.nextafter(edge, infinity)), 2 * bound, 1e18, largest / 4, largest]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    low, high = math.log(info.tiny), math.log(largest)
    random = torch.exp(torch.rand(groups, 5000, generator=generator, dtype=torch.float64) * (high - low) + low)
    near = bound * (0.5 + torch.rand(groups, 5000, generator=generator, dtype=torch.float64))
    first = torch.tensor(special, dtype=torch.float64).expand(groups, -1)
    return torch.cat([first, random, near], 1).clamp(max=largest).to(dtype)


def audit_clipping(name: str, make: MakeRule) -> Finding:
    """Over bounds from 1e-3 to 1e3, in single and double precision."""
    worst, tried = 0.0, 0
    for bound in (1e-3, 0.1, 1.0, 37.0, 1e3):
        for dtype in (torch.float32, torch.float64):
            rule = make(bound)
            rule.prepare(1.0, 16.0)
            norms = _norms(len(rule.groups(NAMES)), bound, dtype)
            w = rule.weights(norms)
            tried += norms.shape[1]
            if not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
                wrong = float(w[~(w >= 0) | ~torch.isfinite(w)][0])
                return failed(name, "clipping", f"a weight is {wrong} at C = {bound:g}", tried)
            moved = (w.double() * norms.double()).square().sum(0).sqrt() / rule.sensitivity
            worst = max(worst, float(moved.max()))
            if worst > 1 + TOLERANCE:
                at = norms[:, int(moved.argmax())].tolist()
                reason = f"gradients of norms {at} pass at {worst:.6g} times the sensitivity {rule.sensitivity:g}"
                return failed(name, "clipping", reason, tried, {"sensitivity": worst})
            problem = _side(rule, norms)
            if problem:
                return failed(name, "clipping", problem, tried)
    return passed(name, "clipping", tried, {"sensitivity": worst})


def _side(rule: ClippingRule, norms: torch.Tensor) -> str | None:
    """What else is asked must stay within its sensitivity, and gradient and side query together within σ."""
    query = rule.side_query(norms)
    if query is None:
        return None if rule.gradient_multiplier(1.0) >= 1.0 else "the gradient gets less noise than claimed"
    if bool((query.values.abs() > query.sensitivity * (1 + TOLERANCE)).any()):
        return f"a side query of sensitivity {query.sensitivity:g} has the value {float(query.values.abs().max()):g}"
    for sigma in (0.5, 1.0, 3.0):
        rule.prepare(sigma, 16.0)
        query = rule.side_query(norms)
        assert query is not None
        gradient = rule.gradient_multiplier(sigma) ** -2
        side = (query.sensitivity / query.std) ** 2 if query.std > 0 else math.inf
        if gradient + side > sigma**-2 * (1 + TOLERANCE):
            joint = (gradient + side) ** -0.5 if math.isfinite(side) else 0.0
            return f"gradient and side query together have multiplier {joint:.5g}, not {sigma:g}"
    return None


# --- constants -------------------------------------------------------------------------------------------------------

#: what a user may write for a bound or another constant of a rule
EXTREMES = (1e-50, 1e-42, 1e-30, 1e-20, 1e-12, 1e-3, 1e3, 1e12, 1e30)
#: lengths of gradients around which squares leave float32
LENGTHS = (0.0, 1e-44, 1e-38, 1e-30, 1e-23, 1e-22, 1e-20, 1e-19, 1e-15, 1e-10, 1e-3, 1.0, 1e10, 1e18, 1e19)


def audit_constants(name: str, kind: Callable[..., ClippingRule]) -> Finding:
    """Extreme constants are refused, or hold: gradients of every length, measured and summed by the real mechanism."""
    tried, refused = 0, 0
    for label, build in _extreme(kind):
        try:
            rule = build()
        except ValueError:
            refused += 1
            continue
        rule.prepare(1.0, 16.0)
        for length in LENGTHS:
            for direction in ([1.0, -0.7, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0]):
                passes = _contribution(rule, length * torch.tensor([direction]))
                tried += 1
                if not passes <= rule.sensitivity * (1 + TOLERANCE):
                    share = passes / rule.sensitivity
                    reason = f"a gradient of length about {length:g} passes at {share:.5g} times the sensitivity"
                    return failed(name, "constants", f"{reason} ({label})", tried)
    return passed(name, "constants", tried, {"refused": refused})


def _extreme(kind: Callable[..., ClippingRule]) -> Iterator[tuple[str, Callable[[], ClippingRule]]]:
    """The rule with one extreme constant, the bound or any of its options that are numbers."""
    options = inspect.signature(kind).parameters
    numbers = [n for n, p in options.items() if isinstance(p.default, float)]
    for value in EXTREMES:
        yield f"C = {value:g}", lambda v=value: kind(v)  # type: ignore[misc]
        for option in numbers:
            given: dict[str, Any] = {option: value}
            yield f"{option} = {value:g}", lambda g=given: kind(1.0, **g)  # type: ignore[misc]


def _contribution(rule: ClippingRule, gradient: torch.Tensor) -> float:
    """The length of one record's term of the sum."""
    mechanism = GaussianMechanism(0.0, rule)
    mechanism.bind({"first": torch.zeros(2), "second": torch.zeros(2)})
    mechanism.accumulate(PerSampleGradients.from_dense({"first": gradient[:, :2], "second": gradient[:, 2:]}))
    total = torch.cat(list(mechanism.clipped_sum().values())).double()
    return float(total.norm()) if bool(torch.isfinite(total).all()) else math.inf
