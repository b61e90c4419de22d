"""Clipless in several processes: the sums, the counts of adaptive clips and their thresholds are those of one process."""

from __future__ import annotations

import torch

from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    BoundedInput,
    Flatten,
    MaxMin,
    Sequential,
    SpectralConv2d,
    SpectralDense,
)
from erlangen.models import register_model
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session
from erlangen.workers import Workers
from tests.processes import together


def adaptive(input_shape: tuple[int, ...], classes: int) -> Sequential:
    return Sequential(
        BoundedInput(input_shape, 1.0, scale=0.2), SpectralConv2d(input_shape[0], 4, 3), MaxMin(), Flatten(),
        SpectralDense(4 * input_shape[1] * input_shape[2], classes), AdaptiveBackwardClip(0.4, quantile=0.5, rate=1.0),
    )  # fmt: skip


def trained(workers: Workers) -> tuple[list[float], torch.Tensor]:
    """Thresholds after every step, and the last weights."""
    register_model("test-adaptive", adaptive)
    config = TrainConfig(
        model="test-adaptive", mechanism="clipless", mechanism_options={"loss": "cross-entropy"}, epsilon=None,
        noise_multiplier=0.5, steps=4, batch=48, seed=0, lr=0.1,
    )  # fmt: skip
    if not workers.first:
        config = TrainConfig.from_dict(workers.decide(dict)["config"])
    session = Session(config, workers=workers)
    bounds = []
    for _ in range(config.steps):
        session.step()
        bounds.append(session.training.mechanism.adaptive[0].bound)
    return bounds, torch.cat([p.detach().flatten() for p in session.model.parameters()])


def test_workers_share_adaptive_thresholds():
    bounds, weights = trained(Workers())
    assert len(set(bounds)) == 4, "the threshold moves, or there is nothing to share"
    for found, others in together(2, trained, timeout=60.0):
        assert torch.allclose(torch.tensor(found), torch.tensor(bounds), rtol=1e-6)
        assert torch.allclose(others, weights, atol=1e-6)
