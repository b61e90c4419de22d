"""Black-box audit: mislabelled records as canaries, their loss as the score, one run (Steinke et al. 2023).

Works on anything that trains: ``train(x, y)`` returns a model (``model(x) → logits``). The attacker sees the final model only, so
bounds are far below those of gradient canaries; they are what somebody with the published weights could prove.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.audit.one_run import able_guesses, best_guesses, conclude_one_run, guess
from erlangen.audit.verdict import CONFIDENCE, Finding

Model = Callable[[Tensor], Tensor]
Train = Callable[[Tensor, Tensor], Model]


@dataclasses.dataclass(frozen=True)
class Planted:
    """Training data with some canaries in it, and all canaries with their coins."""

    x: Tensor
    y: Tensor
    canary_x: Tensor
    canary_y: Tensor
    included: np.ndarray


def plant(x: Tensor, y: Tensor, classes: int, canaries: int, seed: int = 0) -> Planted:
    """Take ``canaries`` records out of the data, give each a wrong label, and put back those whose coin says so."""
    if canaries >= len(x):
        raise ValueError(f"{canaries} canaries do not fit into {len(x)} records; use fewer")
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    chosen, rest = order[:canaries], order[canaries:]
    wrong = (y[chosen] + torch.randint(1, classes, (canaries,), generator=g)) % classes
    included = torch.rand(canaries, generator=g) < 0.5
    wrong = wrong.to(y)
    data = torch.cat([x[rest], x[chosen][included]]), torch.cat([y[rest], wrong[included]])
    return Planted(*data, x[chosen], wrong, included.numpy())


def audit_training_function(
    train: Train, x: Tensor, y: Tensor, *, classes: int, epsilon: float, delta: float, canaries: int = 200, name: str = "training",
    guesses: int | None = None, mu: float = 1.0, seed: int = 0, confidence: float = CONFIDENCE,
) -> Finding:  # fmt: skip
    """Train once with canaries; guess each from its loss; bound ε against the claim (ε, δ) of the training function.

    Unless told otherwise it makes as many guesses as can refute the claim, and a quarter more, of which some may be wrong.
    """
    planted = plant(x, y, classes, canaries, seed)
    model = train(planted.x, planted.y)
    scores = -losses(model, planted.canary_x, planted.canary_y)
    able = able_guesses(canaries, epsilon, delta, confidence) or 0
    made = max(best_guesses(canaries, mu, delta), min(canaries, able * 5 // 4)) if guesses is None else guesses
    facts = {"advantage": advantage(scores[planted.included], scores[~planted.included])}
    return conclude_one_run(
        name, "membership", guess(scores, planted.included, made), epsilon, delta, facts, confidence
    )


@torch.no_grad()
def losses(model: Model, x: Tensor, y: Tensor) -> np.ndarray:
    device = next((p.device for p in model.parameters()), x.device) if isinstance(model, torch.nn.Module) else x.device
    if isinstance(model, torch.nn.Module):
        model.eval()
    return F.cross_entropy(model(x.to(device)).float(), y.to(device), reduction="none").double().cpu().numpy()


def advantage(members: np.ndarray, others: np.ndarray) -> float:
    """Area under the ROC curve, less a half: 0 is chance. A description, not a bound."""
    if not len(members) or not len(others):
        return 0.0
    both = np.concatenate([members, others])
    ranks = both.argsort(kind="stable").argsort() + 1
    area = (ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others))
    return float(area - 0.5)


def audit_session(config: Any, name: str, *, canaries: int = 200, seed: int = 0, progress: Callable[[int, int], None] | None = None,
                  confidence: float = CONFIDENCE) -> Finding:  # fmt: skip
    """The same over a configuration of ours: the run is replayed with canaries among its records."""
    from erlangen.accounting import gdp_mu
    from erlangen.training.built import load_data
    from erlangen.training.session import Session

    data = load_data(config)
    if data.unit is not None:
        raise ValueError("membership audits plant single records; this run's unit of privacy is a group of them")
    spent: dict[str, float] = {}

    def train(x: Tensor, y: Tensor) -> Model:
        planted = dataclasses.replace(data, x_train=x.numpy(), y_train=y.numpy())
        session = Session(config, planted, run_id=f"{name}-membership-{seed}")
        for step in range(session.config.steps):
            session.step()
            if progress is not None:
                progress(step + 1, session.config.steps)
        spent["epsilon"], spent["delta"] = session.epsilon(), session.config.delta or 1e-5
        paid = [(session.training.event(), session.step_count)]
        spent["mu"] = 1.0 if math.isinf(spent["epsilon"]) else gdp_mu(paid, spent["delta"])
        return session.model

    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    canaries = min(canaries, len(x) // 4)
    planted = plant(x, y, data.classes, canaries, seed)
    scores = -losses(train(planted.x, planted.y), planted.canary_x, planted.canary_y)
    made = best_guesses(canaries, spent["mu"], spent["delta"])
    facts = {"advantage": advantage(scores[planted.included], scores[~planted.included]), "canaries": canaries}
    return conclude_one_run(
        name, "membership", guess(scores, planted.included, made), spent["epsilon"], spent["delta"], facts, confidence
    )
