"""Members of an ensemble beside the sessions that they stand for."""

from __future__ import annotations

from typing import Any

import torch

from erlangen.data.base import Dataset
from erlangen.sampling import PoissonSampler
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Draw, Ensemble
from erlangen.training.session import Session


def session_draws(config: TrainConfig, run_id: str, records: int) -> Draw:
    sampler = PoissonSampler(records, config.batch, config.seed, run_id)
    return lambda steps: [sampler.draw().numpy() for _ in range(steps)]


def like_sessions(configs: list[TrainConfig], dataset: Dataset, **options: Any) -> Ensemble:
    """An ensemble that draws the batches of sessions."""
    ids = [f"member-{k}" for k in range(len(configs))]
    draws = [session_draws(c, i, len(dataset)) for c, i in zip(configs, ids, strict=True)]
    return Ensemble(configs, dataset, run_ids=ids, draws=draws, **options)


def trained_alike(
    configs: list[TrainConfig], dataset: Dataset, rtol: float, atol: float, **options: Any
) -> tuple[Ensemble, list[Session]]:
    """An ensemble and a session for each of its members, after all their steps. Their weights are the same, or it fails."""
    ensemble, sessions = like_sessions(configs, dataset, **options), []
    ensemble.run()
    for k, config in enumerate(configs):
        session = Session(config, dataset, run_id=f"member-{k}")
        for _ in range(config.steps):
            session.step()
        last = session.model.state_dict()
        for name, value in ensemble.stack.state_dict(k).items():
            torch.testing.assert_close(value, last[name], rtol=rtol, atol=atol)
        sessions.append(session)
    return ensemble, sessions
