"""A private step with products in 16 bits, as GPUs take them: networks of every kind of field train, and go where float32 goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from erlangen.data import Dataset
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

SMALL = {"field_counts": [4, 4, 4]}
GROUPS = {
    f"eq-resnet9 {group}": ("eq-resnet9", {"group": group, **SMALL, **more})
    for group, more in {
        "C4": {"norm_groups": 2}, "D4": {"restriction": False, "scale_norm": True}, "SO2": {"frequency": 2}, "O2": {"frequency": 1},
    }.items()
}  # fmt: skip
NETWORKS = {**{name: (name, {}) for name in ("lenet", "cnn", "mlp")}, **GROUPS}


def images(shape: tuple[int, int, int], records: int = 8) -> Dataset:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((records, *shape)).astype(np.float32)
    return Dataset("made up", x, np.arange(records) % 10, x[:4], np.arange(4), 10)


def step(name: str, precision: str) -> torch.Tensor:
    """How one step without noise moves the weights."""
    model, options = NETWORKS[name]
    shape = (3, 16, 16) if model == "eq-resnet9" else (1, 28, 28)
    config = TrainConfig(
        data="made up", model=model, model_options=options, batch=4, steps=1, lr=1.0, epsilon=None, noise_multiplier=0.0,
        delta=1e-5, seed=0, precision=precision, device="cpu", max_grad_norm=1.0,
    )  # fmt: skip
    session = Session(config, images(shape), "sixteen")
    before = {n: p.detach().clone() for n, p in session.model.named_parameters()}
    session.step()
    return torch.cat([(p.detach() - before[n]).flatten() for n, p in session.model.named_parameters()]).double()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_in_sixteen_bits_goes_where_float32_goes(name: str) -> None:
    exact, rounded = step(name, "float32"), step(name, "bf16")
    assert exact.norm() > 0
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.95
