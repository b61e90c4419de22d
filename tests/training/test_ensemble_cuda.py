"""Ensembles on a GPU: graphs of kernels against the plain layers, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from erlangen.data.base import Dataset
from erlangen.gradients import kernels

# a module that is first read while the switch is off has no kernels
from erlangen.gradients.kernels import (  # noqa: F401
    stacked_circulant,
    stacked_conv,
    stacked_fields,
    stacked_filters,
    stacked_norm,
    stacked_pool,
    stacked_rows,
    stacked_windows,
)
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CASES = {
    "c8-cnn": ((1, 28, 28), {"field_counts": (4, 8, 16), "head_pool": "max"}),
    "lenet": ((1, 28, 28), {}),
    "geodp-cnn": ((1, 28, 28), {}),
    "model3": ((3, 32, 32), {}),
    "resnet20": ((3, 32, 32), {}),
    "resnet3": ((3, 32, 32), {}),
    "alexnet": ((3, 32, 32), {}),
    "model3 in blocks": ((3, 32, 32), {"circulant": 4}),
    "alexnet in blocks": ((3, 32, 32), {"circulant": 4}),
}
DEVICE = "cuda"


def data(shape: tuple[int, ...], records: int = 60) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, *shape)).astype(np.float32)
    y = rng.integers(0, 4, records)
    return Dataset("noise", x, y, x[:20], y[:20], 4)


def members(name: str, **changes) -> list[TrainConfig]:
    base = TrainConfig(
        data="noise", model=name.split()[0], model_options=CASES[name][1], epsilon=None, noise_multiplier=0.0, batch=8, steps=3,
        lr=0.5, max_grad_norm=0.5, device=DEVICE, ema=0.0, **changes,
    )  # fmt: skip
    return [dataclasses.replace(base, seed=k, max_grad_norm=0.5 / (k + 1)) for k in range(2)]


def moved(monkeypatch, name: str, precision: torch.dtype | None, fast: bool, **changes) -> torch.Tensor:
    with monkeypatch.context() as patch:
        if not fast:
            patch.setattr(kernels, "HAS_TRITON", False)
        ensemble = Ensemble(members(name, **changes), data(CASES[name][0]), precision=precision, rows=8, graph=fast)
        before = ensemble.stack.flat.clone()
        ensemble.run()
        return (before - ensemble.stack.flat).double()


@pytest.mark.parametrize("name", CASES)
def test_float32_graphs_of_kernels_take_the_plain_steps(monkeypatch, name):
    plain, fast = (moved(monkeypatch, name, None, fast) for fast in (False, True))
    assert float((fast - plain).norm() / plain.norm()) < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_kernels_are_as_near_to_float32_as_the_plain_layers(monkeypatch, name):
    exact = moved(monkeypatch, name, None, False)
    plain, fast = (moved(monkeypatch, name, torch.bfloat16, fast) for fast in (False, True))
    error = lambda found: float((found - exact).norm() / exact.norm())  # noqa: E731
    assert error(fast) < 2 * error(plain) + 0.03


@pytest.mark.parametrize("mechanism", ["rep", "spectral", "geodp"])
def test_other_families_agree_too(monkeypatch, mechanism):
    name = "c8-cnn" if mechanism == "rep" else "lenet"
    plain, fast = (moved(monkeypatch, name, None, fast, mechanism=mechanism) for fast in (False, True))
    assert float((fast - plain).norm() / plain.norm()) < 1e-2


@pytest.mark.parametrize("name", ["model3", "resnet20", "alexnet", "model3 in blocks", "alexnet in blocks"])
def test_filtered_bfloat16_kernels_are_as_near_to_float32_as_the_plain_layers(monkeypatch, name):
    exact = moved(monkeypatch, name, None, False, mechanism="spectral")
    plain, fast = (moved(monkeypatch, name, torch.bfloat16, fast, mechanism="spectral") for fast in (False, True))
    error = lambda found: float((found - exact).norm() / exact.norm())  # noqa: E731
    assert error(fast) < 2 * error(plain) + 0.03


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["model3", "c8-cnn", "alexnet in blocks"])
def test_a_record_alone_moves_its_bound_at_most(name, precision):
    """With the kernels, in both precisions; a record that is not finite moves nothing."""
    shape = CASES[name][0]
    for value, most in ((None, 1.0), (float("nan"), 0.0)):
        dataset = data(shape)
        if value is not None:
            dataset.x_train[3] = value
        configs = [dataclasses.replace(c, steps=1, lr=1.0, batch=1, momentum=0.0) for c in members(name)]
        ensemble = Ensemble(configs, dataset, precision=precision, draws=[lambda n: [np.array([3])] * n] * 2)
        before = ensemble.stack.flat.double()
        ensemble.run()
        length = (before - ensemble.stack.flat.double()).norm(dim=1).cpu()
        assert bool((length <= most * torch.tensor([0.5, 0.25]) * (1 + 1e-5)).all())


@pytest.mark.parametrize("graph", [False, True])
def test_an_ensemble_that_nobody_holds_is_gone_without_a_collection(graph):
    """One after the other on the same device: a cycle would keep gigabytes until the collector happens to run."""
    gc.collect()
    gc.disable()
    try:
        ensemble = Ensemble(members("lenet"), data(CASES["lenet"][0]), rows=8, graph=graph)
        ensemble.run()
        held = [weakref.ref(t) for t in (ensemble.stack.flat, ensemble.stack.skeleton, ensemble.total, ensemble.x)]
        del ensemble
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()
