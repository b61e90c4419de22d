"""The report of a clipless run shows its certified accuracy; that of another run does not."""

from __future__ import annotations

import pytest
import torch

from erlangen.lipschitz import certified_radius
from erlangen.report import build, charts, read, render
from erlangen.training import TrainConfig, run


@pytest.fixture(scope="module")
def clipless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "clipless"
    run.train(
        TrainConfig(
            mechanism="clipless", epsilon=None, noise_multiplier=0.5, steps=15, batch=256, seed=0, evaluations=1
        ),
        folder,
    )
    return read(folder)


def test_certified_accuracy_falls_from_accuracy_with_the_radius(clipless):
    model = clipless.model()
    chart = charts.radius(clipless, model)
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (chart.series[0].x, chart.series[0].y))
    right = clipless.public.logits.argmax(1) == clipless.public.labels
    assert float(y[0]) == pytest.approx(float(right.double().mean()), abs=1e-3)
    found = certified_radius(model, clipless.public.logits)
    for radius, share in zip(x[::20], y[::20], strict=True):
        assert float(share) == pytest.approx(float((right & (found >= radius)).double().mean()), abs=0.01)
    assert bool((y.diff() <= 0).all())
    assert float(y[-1]) < 0.1 < float(y[0])


def test_only_networks_with_a_constant_have_one(clipless, trained):
    assert "Certified robustness" in render(build([clipless]))
    assert "Certified robustness" not in render(build([read(trained)]))
