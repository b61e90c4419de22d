"""The study of the defaults: what it varies, and how it compares."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scripts import script

defaults = script("defaults")


def row(variant: str, seed: int, accuracy: float) -> dict:
    return {"data": "d", "epsilon": 3.0, "variant": variant, "seed": seed, "accuracy": {"0.99": accuracy}}


def test_gains_are_paired_by_seed():
    rows = [row("rate ×1", 0, 0.9), row("rate ×1", 1, 0.5), row("walk 0.2", 0, 0.91)]
    assert "| walk 0.2 | 91.0 | +1.0 | +1.0 |" in defaults.table(rows, "0.99")  # not 91 − 70


def test_a_walk_is_the_noise_of_the_whole_run():
    config = defaults.config_of("walk 0.2, C = 0.1", 3.0, 0, 400)
    moved = config.lr / (1 - config.momentum) * config.max_grad_norm * config.noise_multiplier * config.steps**0.5
    assert moved / config.batch == pytest.approx(0.2)


def test_patients_are_on_one_side_only():
    data = defaults.shapes(patients=5)
    assert len(np.unique(data.unit)) == 5
    assert (len(data), data.x_test.shape[0]) == (10, 400)
