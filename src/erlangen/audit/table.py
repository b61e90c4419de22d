"""The table of every mechanism of the five papers, of companions and of code that is not ours: claimed against measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from erlangen import accounting
from erlangen.audit.montecarlo import Subject, audit_releases
from erlangen.audit.named import audit_named, equivariant_network, three_layers
from erlangen.audit.neighbours import Pair
from erlangen.audit.verdict import Finding, unable

#: told what is being audited, and how much of it is done
Tell = Callable[[str, int, int], None]

GEODP: Mapping[str, Any] = {"sigma": 8.0, "d": 500, "batch": 4096.0, "bound": 0.1}


@dataclass(frozen=True)
class Entry:
    """One row: whose claim it is, and how the mechanism is built."""

    paper: str
    label: str
    mechanism: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    claimed_by: str = "erlangen"
    #: what is attacked where it is not a mechanism's `release`: (σ, seed) → a subject and its neighbouring pairs
    subject: Callable[[float, int], tuple[Subject, list[Pair] | None]] | None = None


def training_step(split: str, sigma: float, seed: int) -> tuple[Subject, list[Pair]]:
    """Clipless in the engine: records in, private gradients out, on a network whose bounds some record reaches."""
    from erlangen.audit.recipes import dense_lipschitz_network
    from erlangen.audit.steps import Step, hostile

    def build() -> Step:
        torch.manual_seed(0)
        options = {"loss": 1.0, "split": split}
        return Step(dense_lipschitz_network(), (5,), "clipless", options, sigma=sigma, seed=seed, parts=1)

    step = build()
    return Subject("training step", build, step.shapes), list(islice(hostile(step, seed), 4))


def decision(sigma: float, seed: int) -> tuple[Subject, None]:
    from erlangen.audit.companions import Decision
    from erlangen.mechanisms.companions import SelectiveUpdate

    return Subject("selective update", lambda: Decision(SelectiveUpdate, sigma, seed), Decision.shapes), None


def importance_step(sigma: float, seed: int) -> tuple[Subject, None]:
    from erlangen.audit.companions import ImportanceStep
    from erlangen.mechanisms.companions import ImportanceSampling

    shapes = ImportanceStep.shapes
    return Subject("importance", lambda: ImportanceStep(ImportanceSampling, sigma, seed=seed), shapes), None


def entries() -> list[Entry]:
    """Sound forms against their own event, published forms against the paper's claim *and* against their true price."""
    four, free = {"claim_epsilon": 4.0}, {"loss": 1.0}
    published = {"as_published": True, "beta": 0.1}
    slow = {**four, "trials": 4000}
    trained, equally = (partial(training_step, split) for split in ("optimal", "local"))
    steerable, layers = {**four, "network": equivariant_network}, {**four, "clipping": "per-layer", "network": three_layers}
    return [
        Entry("DP-SGD", "ISO", "iso", {}, four),
        Entry("DP-SGD", "ISO, clipping per layer", "iso", {}, {**four, "clipping": "per-layer"}),
        Entry("DP-SGD", "ISO, AUTO-S", "iso", {}, {**four, "clipping": "auto-s"}),
        Entry("DP-SGD", "ISO, PSAC", "iso", {}, {**four, "clipping": "psac"}),
        Entry("DP-SGD", "ISO, adaptive quantile", "iso", {}, {**four, "clipping": "adaptive"}),
        Entry("REP", "REP, steerable network", "rep", {}, steerable),
        Entry("REP", "SHUFFLE, steerable network", "shuffle", {}, steerable),
        Entry("Equivariant networks", "ISO, steerable network", "iso", {}, steerable),
        Entry("Clipless", "Clipless, optimal split", "clipless", free, four),
        Entry("Clipless", "Clipless, equal multipliers", "clipless", {**free, "split": "local"}, four),
        Entry("Clipless", "Clipless, training steps", "clipless", {}, slow, subject=trained),
        Entry("Clipless", "Clipless, training steps, equal multipliers", "clipless", {}, slow, subject=equally),
        Entry("Spectral-DP", "Spectral-DP, sound form", "spectral", {}, four),
        Entry("Spectral-DP", "Spectral-DP as published, 3 layers", "spectral", {"as_published": True}, layers, "paper"),
        Entry("GReDP", "GReDP, sound form", "gredp", {}, four),
        Entry("GReDP", "GReDP as published, complex noise", "gredp", {"as_published": "complex"}, four, "paper"),
        Entry("GReDP", "GReDP as published, complex noise", "gredp", {"as_published": "complex"}, {"claim_epsilon": 1.0}, "paper"),
        Entry("GReDP", "GReDP as published, 3 layers", "gredp", {"as_published": "complex"}, layers, "paper"),
        Entry("GReDP", "GReDP as published, real noise", "gredp", {"as_published": "real"}, four, "paper"),
        Entry("GReDP", "GReDP as published, noise per sample", "gredp", {"as_published": "per-sample"}, four, "paper"),
        Entry("GeoDP", "GeoDP, direction (S2)", "geodp", {}, four),
        Entry("GeoDP", "GeoDP, shrunk direction (S3)", "geodp", {"form": "shrink"}, four),
        Entry("GeoDP", "GeoDP, angles (S1)", "geodp", {"form": "angles"}, four),
        Entry("GeoDP", "GeoDP as published", "geodp", published, GEODP, "paper"),
        Entry("companions", "Selective update, one decision", "selective-update", {}, four, subject=decision),
        Entry("companions", "Importance sampling, a step at rate ≤ ½", "importance-sampling", {}, four, subject=importance_step),
    ]  # fmt: skip


def wanted() -> list[Entry]:
    """Every entry; a mechanism that is registered but stands in no entry gets one of its own."""
    return [*entries(), *_unlisted()]


def audit_entry(
    entry: Entry, scale: float = 1.0, seed: int = 0, tell: Tell = lambda what, done, total: None
) -> Finding:
    try:
        settings = {**_sized(entry, scale), "seed": seed, "progress": partial(tell, entry.label)}
        special = entry.subject is not None
        found = _special(entry, settings) if special else audit_named(entry.mechanism, entry.options, **settings)
    except Exception as error:
        found = unable(entry.label, "mechanism", f"{type(error).__name__}: {error}")
    return replace(found, subject=entry.label)


def _special(entry: Entry, settings: Mapping[str, Any]) -> Finding:
    assert entry.subject is not None
    sigma = accounting.noise_multiplier(settings["claim_epsilon"], 1e-5, 1.0, 1)
    subject, pairs = entry.subject(sigma, settings["seed"])
    exact = accounting.epsilon(subject.build().event(), 1e-5)
    return audit_releases(
        subject, settings["trials"], pairs=pairs, exact=exact, seed=settings["seed"], progress=settings["progress"]
    )


def _sized(entry: Entry, scale: float) -> dict[str, Any]:
    """Fewer trials than a single audit takes, so that the whole table is minutes."""
    by_calls = (
        entry.subject is not None
        or entry.mechanism in ("geodp", "clipless")
        or entry.settings.get("clipping") == "adaptive"
    )
    trials = 12_000 if by_calls else 40_000_000 if entry.settings.get("claim_epsilon") == 1.0 else 2_000_000
    trials = entry.settings.get("trials", trials)
    return {**entry.settings, "trials": max(500, int(trials * scale))}


def _unlisted() -> Iterator[Entry]:
    from erlangen.mechanisms import mechanisms

    listed = {entry.mechanism for entry in entries()}
    for name in mechanisms():
        if name not in listed:
            yield Entry("other", name, name, {}, {"claim_epsilon": 4.0})


def audit_opacus(trials: int = 6000) -> list[Finding]:
    """Opacus's optimizer with finite gradients, and with every gradient that floating point knows."""
    from erlangen.audit.foreign import opacus_subject
    from erlangen.audit.neighbours import portfolio

    sigma = accounting.noise_multiplier(4.0, 1e-5, 1.0, 1)
    subject = opacus_subject(sigma)
    exact = accounting.epsilon(accounting.gaussian(sigma), 1e-5)
    pairs = portfolio(subject.shapes)
    finite = audit_releases(subject, trials, pairs=pairs[:-1], exact=exact)
    hostile = audit_releases(subject, max(500, trials // 6), pairs=pairs[-1:], exact=exact)
    return [
        replace(finite, subject="Opacus DPOptimizer, finite gradients"),
        replace(hostile, subject="Opacus DPOptimizer, a gradient that is not a number"),
    ]


def shown(value: float | None) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else f"{value:.3f}"
