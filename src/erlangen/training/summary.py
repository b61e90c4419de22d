"""What a run says of itself: facts for ``summary.json``, and one sentence for somebody who does not know the field."""

from __future__ import annotations

from typing import Any

import torch

import erlangen
from erlangen.accounting.words import in_json, meaning, upper, why_none
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session


def summarise(session: Session, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Facts only: test metrics, the guarantee by both accountants, what it rests on, what it does not cover."""
    config, mechanism = session.config, session.training.mechanism
    names = getattr(session.dataset, "class_names", None)
    guarantee = {
        "epsilon": {method: in_json(session.epsilon(method)) for method in ("pld", "rdp")},
        "delta": config.delta,
        "neighbouring": mechanism.neighbouring,
        "unit": session.units.name,
        "sampler": session.sampler.describe(),
        "mechanism": session.mechanism_facts(),
        "releases": session.accountant.steps,
    }
    return {
        "test": {k: v for k, v in metrics.items() if k not in ("step", "epsilon", "non_private", "small_parameters")},
        "small_parameters": metrics.get("small_parameters"),
        "guarantee": guarantee,
        "steps": session.step_count,
        "planned_steps": config.steps,
        "data": {
            "name": session.dataset.name,
            "records": len(session.dataset),
            "classes": session.dataset.classes,
            "class_names": None if names is None else list(names),
            "input_shape": list(session.dataset.input_shape),
            "fingerprint": session.dataset.fingerprint(),
        },
        "parameters": sum(p.numel() for p in session.model.parameters() if p.requires_grad),
        "randomness": mechanism.noise.description,
        "non_private": non_private(config),
        "seconds": round(seconds, 2),
        "versions": {"erlangen": erlangen.__version__, "torch": torch.__version__},
    }


def in_plain_words(summary: dict[str, Any]) -> str:
    """The guarantee as a sentence for somebody who does not know the field."""
    guarantee = summary["guarantee"]
    epsilon, delta = guarantee["epsilon"]["pld"], guarantee["delta"]
    whose = "record" if guarantee["unit"] == "record" else f"{guarantee['unit']} (all their records together)"
    if epsilon == "inf":
        why = why_none(guarantee["mechanism"]["guarantee"], guarantee["sampler"].get("guarantee"))
        return f"No privacy guarantee: ε = ∞, because {why}."
    in_short = f"ε = {upper(epsilon, 3)} at δ = {upper(delta, 2, 'e')} for each {whose}."
    return f"{in_short} {meaning(epsilon, delta, guarantee['unit'], guarantee['neighbouring'])}"


def non_private(config: TrainConfig) -> list[str]:
    """Statistics of private records that were computed outside a mechanism."""
    from erlangen.training.diagnostics import NAMES

    if not config.non_private:
        return []
    return ["train_loss", "small_gradients", *(NAMES if config.mechanism != "clipless" else ())]
