"""The privacy calculator: what a plan costs, and the noise that a target needs. The same accountant as everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erlangen.accounting import AccountingError, Method, epsilon, gaussian, noise_multiplier, poisson, tradeoff
from erlangen.accounting.words import in_json
from erlangen.report.privacy import tone_of

#: what an answer within seconds allows; the command line has no such limits
LIMITS = {
    "sigma": (0.1, 1000.0),
    "rate": (1e-6, 1.0),
    "steps": (1, 10_000_000),
    "delta": (1e-12, 0.1),
    "target": (0.01, 1000.0),
}
FALSE_ALARMS = (0.001, 0.01, 0.1)


class BadPlan(ValueError):
    """A value that cannot be priced; the message names it, its value and what it may be."""


def cost(plan: Mapping[str, str]) -> dict[str, Any]:
    """ε of ``steps`` Poisson-sampled Gaussian releases with multiplier ``sigma`` at rate ``rate``, at ``delta``.

    By PLD, or with ``method=rdp`` by RDP, which is quicker and never smaller in truth: a bound to show while PLD computes.
    """
    sigma, rate, delta = (_number(plan, name) for name in ("sigma", "rate", "delta"))
    steps, method = int(_number(plan, "steps")), _method(plan)
    return {**_priced(sigma, rate, steps, delta, method), "method": method}


def noise(plan: Mapping[str, str]) -> dict[str, Any]:
    """The smallest σ, to 0.1 %, with ε ≤ ``target``, and the ε that it really gives (PLD)."""
    target, rate, delta = (_number(plan, name) for name in ("target", "rate", "delta"))
    steps = int(_number(plan, "steps"))
    try:
        sigma = noise_multiplier(target, delta, rate, steps)
    except AccountingError as error:
        raise BadPlan(str(error)) from error
    return {**_priced(sigma, rate, steps, delta, "pld"), "method": "pld", "target": target}


def _priced(sigma: float, rate: float, steps: int, delta: float, method: Method) -> dict[str, Any]:
    events = [(poisson(rate, gaussian(sigma)), steps)]
    try:
        value = epsilon(events, delta, method)
        attacks = [{"fpr": fpr, "tpr": tradeoff(events, fpr)} for fpr in FALSE_ALARMS] if method == "pld" else []
    except AccountingError as error:
        raise BadPlan(str(error)) from error
    return {
        "epsilon": in_json(value), "sigma": sigma, "rate": rate, "steps": steps, "delta": delta,
        "attacker": attacks, "neighbouring": "add-or-remove-one", "tone": tone_of(value),
    }  # fmt: skip


def _number(plan: Mapping[str, str], name: str) -> float:
    low, high = LIMITS[name]
    text = plan.get(name, "")
    try:
        value = float(text)
    except ValueError:
        raise BadPlan(f"{name} is {text[:40]!r}; give a number from {low:g} to {high:g}") from None
    if not low <= value <= high:  # also refuses NaN
        raise BadPlan(f"{name} is {text[:40]}; give a number from {low:g} to {high:g}")
    return value


def _method(plan: Mapping[str, str]) -> Method:
    text = plan.get("method", "pld")
    if text == "pld":
        return "pld"
    if text == "rdp":
        return "rdp"
    raise BadPlan(f"method is {text[:40]!r}; choose pld or rdp")
