"""The selective-update benchmark: the same run beside it, and decisions that are those of the session."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest

from erlangen.data.base import Dataset
from tests.scripts import script

selective = script("selective")

OPTIONS = {"sigma": 16.0, "length": 0.8, "momentum": 0.5, "bound": 1.0, "clip": 0.1, "batch": 64, "steps": 4, "seed": 0}


def options(**changes: float) -> argparse.Namespace:
    return argparse.Namespace(**{**OPTIONS, **changes})


@pytest.fixture(scope="module")
def data() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (200, 1, 28, 28)).astype(np.float32), np.arange(200) % 10
    return Dataset("mnist", x, y, x[:40], y[:40], 10)


def test_the_noise_on_the_average_is_the_tables():
    plain, judged = (selective.config(options(), s) for s in (False, True))
    assert plain.noise_multiplier / plain.batch == pytest.approx(16.0 / 16_384)
    assert math.isclose(plain.lr * plain.max_grad_norm / (1 - plain.momentum), 0.8)
    assert (plain.selective, judged.selective) == (False, True)
    assert {**vars(judged), "selective": False, "selective_options": {}} == vars(plain)


def test_steps_that_help_are_accepted_and_steps_that_harm_are_not(data):
    accepted, _ = selective.decisions(selective.config(options(sigma=0.0), selective=False), data)
    assert accepted == [True] * 4
    short = selective.config(options(sigma=1e-3, length=0.2, momentum=0.0, batch=200), selective=True)
    assert selective.decisions(short, data)[0] == [True] * 4
    wild = selective.config(options(sigma=1e-3, length=1e4, momentum=0.0, batch=200), selective=True)
    accepted, accuracy = selective.decisions(wild, data)
    assert accepted == [False] * 4
    assert 0 <= accuracy <= 1
