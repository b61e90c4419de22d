"""The mechanism audit by name: what the command line and the table ask for.

As published, a mechanism is audited against what its paper claims: a Gaussian of multiplier σ. Otherwise against its own event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from erlangen import accounting
from erlangen.audit.montecarlo import Progress, Subject, audit_releases
from erlangen.audit.neighbours import Pair, unflatten
from erlangen.audit.recipes import Recipe, first_that_builds
from erlangen.audit.verdict import CONFIDENCE, Claim, Finding
from erlangen.mechanisms import mechanisms
from erlangen.spelling import hint

#: trials in each world: rows of a few coordinates, rows, and one call at a time
FEW_COORDINATES, ROWS, CALLS = 40_000_000, 1_000_000, 12_000


def kernel_network() -> nn.Module:
    """One kernel of three taps: the smallest thing with an odd frequency."""
    return nn.Conv1d(1, 1, 3, bias=False)


def vector_network(d: int) -> nn.Module:
    return nn.Linear(d, 1, bias=False)


def equivariant_network() -> nn.Module:
    """Two steerable convolutions: what trains are coefficients of a kernel basis."""
    from erlangen import equivariant as eq

    image, hidden = eq.trivial_fields(eq.cyclic(4), 1), eq.regular_fields(eq.cyclic(4), 1)
    return nn.Sequential(eq.SteerableConv2d(image, hidden, 3), eq.SteerableConv2d(hidden, image, 3, bias=False))


def three_layers() -> nn.Module:
    """A kernel, a slope and a head: three layers of one tensor each, so that each is clipped by itself."""
    return nn.Sequential(nn.Conv2d(1, 1, 3, bias=False), nn.PReLU(), nn.Flatten(), nn.Linear(4, 2, bias=False))


def find(
    name: str, options: Mapping[str, Any], *, sigma: float, bound: float, batch: float, d: int | None, seed: int, clipping: str,
    network: Callable[[], nn.Module] | None = None,
) -> Recipe:  # fmt: skip
    """A recipe for a registered mechanism; ``d`` asks for one vector of that many parameters."""
    if name not in mechanisms():
        known = ", ".join(sorted(mechanisms()))
        meant = hint(name, [*mechanisms(), "opacus"])
        raise ValueError(f"mechanism is {name!r}; choose one of {known}, opacus, or package.module:factory.{meant}")
    settings: dict[str, Any] = {"sigma": sigma, "bound": bound, "batch": batch, "seed": seed, "clipping": clipping}
    if network is not None:
        return Recipe(name, options, network, **settings)
    if d is not None:
        return Recipe(name, options, lambda: vector_network(d), **settings)
    if name == "gredp" and clipping == "flat":
        return Recipe(name, options, kernel_network, **settings)
    found = first_that_builds(name, options, **settings)
    if isinstance(found, tuple):
        raise ValueError(f"mechanism {found[0]!r} could not be built for an audit: {found[1]}")
    return found


def angle_pairs(shapes: Mapping[str, torch.Size], bound: float) -> list[Pair]:
    """Worst cases for angles of the averaged gradient: others whose sum a canary turns by a right angle, or turns round."""
    d = sum(s.numel() for s in shapes.values())
    axis = torch.eye(d)[-2:]
    small, last, before = 0.5 * bound, bound * axis[1:], axis[:1]
    return [
        Pair("canary turns a small sum", unflatten(small * before, shapes), unflatten(last, shapes)),
        Pair("canary reverses a small sum", unflatten(-small * axis[1:], shapes), unflatten(last, shapes)),
    ]


def audit_named(
    name: str, options: Mapping[str, Any] | None = None, *, sigma: float | None = None, claim_epsilon: float | None = None,
    delta: float = 1e-5, bound: float = 1.0, batch: float = 4.0, d: int | None = None, trials: int | None = None, seed: int = 0,
    clipping: str = "flat", confidence: float = CONFIDENCE, progress: Progress | None = None,
    network: Callable[[], nn.Module] | None = None,
) -> Finding:  # fmt: skip
    """Attack a registered mechanism. Give σ, or the ε that is claimed for one release (σ is then calibrated to it)."""
    if sigma is not None and claim_epsilon is not None:
        raise ValueError("sigma and claim_epsilon exclude each other: give the one you mean")
    if claim_epsilon is not None:
        sigma = accounting.noise_multiplier(claim_epsilon, delta, 1.0, 1)
    sigma = 1.0 if sigma is None else sigma
    options = dict(options or {})
    recipe = find(
        name, options, sigma=sigma, bound=bound, batch=batch, d=d, seed=seed, clipping=clipping, network=network
    )
    mechanism = recipe.build()
    published = bool(options.get("as_published"))
    event = accounting.gaussian(sigma) if published else mechanism.event()
    exact = accounting.epsilon(mechanism.event(), delta)
    subject = Subject(recipe.name, recipe.build, dict(mechanism.shapes), {"sigma": sigma, "as_published": published})
    pairs = angle_pairs(mechanism.shapes, bound) if name == "geodp" and published else None
    if trials is None:
        trials = default_trials(subject)
    claim = Claim.of(event, delta)
    found = audit_releases(
        subject, trials, claim=claim, exact=exact, pairs=pairs, seed=seed, confidence=confidence, progress=progress
    )
    return found if claim_epsilon is None else replace(found, facts={**found.facts, "claim_epsilon": claim_epsilon})


def default_trials(subject: Subject) -> int:
    """As many as a minute or so allows."""
    from erlangen.audit.montecarlo import Releaser

    if not Releaser(subject).row_wise:
        return CALLS
    return FEW_COORDINATES if sum(s.numel() for s in subject.shapes.values()) <= 4 else ROWS
