"""Clipless presets: configurations that can be built, Theorem 1 in numbers, and a variance that falls as 1/b."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from erlangen.experiments import preset, presets
from erlangen.experiments.clipless import EPSILONS, FRONTS, SPLITS, config, regimes, variance
from erlangen.experiments.presets import QUICK_STEPS, SHAPES
from erlangen.models import make_model


def test_there_are_three():
    assert {p.name for p in presets() if p.name.startswith("clipless")} == {
        "clipless-fig5", "clipless-theorem1", "clipless-variance",
    }  # fmt: skip


def test_a_front_has_every_split_beside_iso_at_equal_epsilon():
    cells = {cell.name: cell for cell in preset("clipless-fig5").cells}
    assert len(cells) == len(FRONTS) * len(EPSILONS) * (len(SPLITS) + 1)
    for cell in cells.values():
        assert all(other in cells for other in cell.against)
    quick = preset("clipless-fig5").quick()
    assert "no result" in quick.note
    assert {c.config.data for c in quick.cells} == set(FRONTS)
    assert all(c.config.steps == QUICK_STEPS for c in quick.cells)
    for data in FRONTS:
        alike = [cells[f"{data} {m} ε=2"].config for m in (*SPLITS, "ISO")]
        assert len({(c.epsilon, c.delta, c.batch, c.steps) for c in alike}) == 1
        for settled in (c.settled(FRONTS[data].records) for c in alike[2:]):
            shape, classes = SHAPES[data]
            model = make_model(settled.model, shape, classes, **settled.model_options)
            assert model(torch.zeros(1, *shape)).shape == (1, classes)


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0])
def test_theorem_one(k):
    """Vanishing, constant per layer, exploding: √D·K^(D−1), reached to more than half by orthogonal layers."""
    options = {"K": k, "width": 16, "data": "digits", "records": 30}
    found = [regimes({**options, "depth": depth}, 0) for depth in (1, 3, 9)]
    for values in found:
        assert values["bound"] == pytest.approx(values["theorem"], rel=2e-3)
        assert 0.3 < values["used"] <= 1.0
    ratio = found[2]["gradient"] / found[1]["gradient"]
    assert ratio == pytest.approx(3**0.5 * k**6, rel=0.3)


def test_variance_falls_as_one_over_the_batch_and_clipping_stays_biased():
    options = {"data": "digits", "records": 200, "steps": 5}
    small, large = (variance({**options, "batch": b}, 0) for b in (8, 128))
    assert small["variance"] / large["variance"] == pytest.approx(16, rel=0.35)
    assert small["clipped_bias"] == large["clipped_bias"] > 0.01


def test_a_cell_trains(monkeypatch):
    from erlangen.training.run import train

    monkeypatch.setitem(FRONTS, "digits", replace(FRONTS["mnist"], records=1438))
    result = train(config("digits", "local", 2.0, batch=64, steps=3, seed=0))
    assert result.summary["guarantee"]["mechanism"]["split"] == "local"
    assert 0 < result.summary["guarantee"]["epsilon"]["pld"] <= 2.0
