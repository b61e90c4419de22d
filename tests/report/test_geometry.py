"""The picture of the noise is the noise: against the metric, the covariance, and the network's own kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from erlangen.equivariant import SteerableConv2d, cyclic, regular_fields, trivial_fields
from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.rep import aligned_metric
from erlangen.models import make_model
from erlangen.report import kernels, noise, read
from erlangen.report.chart import Chart, Gallery, Heat


def bound(name: str, model: torch.nn.Module, **options):
    mechanism = make_mechanism(name, Context(1.3, make_clipping("flat", 0.7), StreamNoise(0), model, 10.0, options))
    mechanism.bind(dict(model.named_parameters()), 10.0)
    return mechanism


def test_rep_is_drawn_as_its_metric():
    model = make_model("cnn", (1, 8, 8), 10, width=4)
    mechanism = bound("rep", model)
    metric, _ = aligned_metric(model, {})
    for name in metric:
        np.testing.assert_allclose(
            noise.relative_std(mechanism, name), metric[name].detach().flatten().double(), rtol=1e-5
        )


@pytest.mark.parametrize("name", ["iso", "rep", "spectral", "gredp"])
def test_relative_noise_squared_is_the_diagonal_of_the_covariance(name):
    model = make_model("cnn", (1, 8, 8), 10, width=4)
    mechanism = bound(name, model)
    scale = (mechanism.noise_multiplier * mechanism.sensitivity) ** 2
    expected = mechanism.covariance("0.weight").diagonal() / scale
    np.testing.assert_allclose(noise.relative_std(mechanism, "0.weight").square(), expected, rtol=1e-5)


def test_the_noise_on_the_taps_is_that_of_the_kernel_basis():
    group = cyclic(4)
    conv = SteerableConv2d(trivial_fields(group, 2), regular_fields(group, 8), 5)
    model = torch.nn.Sequential(conv)
    mechanism = bound("rep", model)
    [(_, drawn, _)] = noise._taps(model, mechanism)
    m = noise.relative_std(mechanism, "0.weight").float()
    basis = torch.stack([conv.expansion.expand(row) for row in torch.eye(len(m))]).detach()
    exact = (basis.square() * m.square().view(-1, 1, 1, 1, 1)).sum(0).mean((0, 1)).sqrt()
    np.testing.assert_allclose(drawn, exact / exact.max(), atol=0.06)


def test_figures_of_a_run(trained):
    run = read(trained)
    strip, energy = noise.figures(run, run.model())
    assert isinstance(strip, Heat)
    assert isinstance(energy, Chart)
    assert strip.values.shape == (len(strip.rows), noise.QUANTILES)
    np.testing.assert_allclose(sum(energy.series[1].y), 1, atol=0.02)
    iso = dataclasses.replace(run, config=dataclasses.replace(run.config, mechanism="iso"))
    assert noise.figures(iso, run.model()) == []
    spectral = dataclasses.replace(run, config=dataclasses.replace(run.config, mechanism="spectral"))
    gallery = noise.figures(spectral, run.model())[-1]
    assert isinstance(gallery, Gallery)
    assert "are released and noised" in gallery.alt


def test_a_row_of_kernels_is_one_kernel_turned(trained):
    model = make_model("c8-cnn", (1, 12, 12), 10, field_counts=(2, 2), rotations=4)
    [gallery] = kernels.figures(read(trained), model)
    assert [p.label for p in gallery.pictures[:4]] == ["0°", "90°", "180°", "270°"]
    for row in range(2):
        first, *others = gallery.pictures[4 * row : 4 * row + 4]
        for k, other in enumerate(others, 1):
            np.testing.assert_allclose(other.pixels, np.rot90(first.pixels, k), atol=1e-6)
    assert kernels.figures(read(trained), make_model("mlp", (1, 8, 8), 10)) == []
