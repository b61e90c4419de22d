"""The report of a clipless run shows its certified accuracy; that of another run does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.deploy.averaged import Averaged
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


def test_answers_averaged_over_views_have_no_radius(tmp_path):
    """The constant is that of one view. Moved views show what is beside an edge twice: their mean changes within the radius."""
    size = 4
    averaged = Averaged(Flat(size), "shift")
    x = torch.full((1, 1, size, size), 1e-3)
    claimed = float(certified_radius(1.0, averaged(x)))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(averaged(x)[0, 0] - averaged(x)[0, 1], x)
    with torch.no_grad():
        inside = averaged(x - 0.95 * claimed * slope / slope.norm())
    assert int(inside.argmax()) != int(averaged(x).argmax())

    config = TrainConfig(
        mechanism="clipless", epsilon=None, noise_multiplier=0.5, steps=15, batch=256, seed=0, evaluations=1, augment="shift",
        average_views=True,
    )  # fmt: skip
    run.train(config, tmp_path / "averaged")
    found = read(tmp_path / "averaged")
    assert found.model() is not None
    assert charts.radius(found, found.model()) is None


class Flat(nn.Module):
    """Two logits, of constant 1: plus and minus the mean of the pixels, as long as it may be."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sign = torch.tensor([1.0, -1.0]) / 2**0.5
        return x.flatten(1).sum(1, keepdim=True) / self.size * sign
