"""A step never makes the host wait for the device: not for what a part computes, and not for what it releases.

On a CPU the parts are computed as on a GPU (`followed`, `blind`) under a watch that refuses every look at a value.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from erlangen.data import Dataset
from erlangen.gradients import RowMap
from erlangen.gradients.tracing import followed
from erlangen.training import TrainConfig
from erlangen.training.graphs import Unrecordable, Watch
from erlangen.training.session import Session

CASES = {
    "views": {"views": 2, "augment": "flip-crop-mix"},
    "padded parts": {"pad": True, "max_physical_batch": 8},
    "patients": {"unit": "patient"},
    "patients in padded parts": {"unit": "patient", "pad": True, "max_physical_batch": 16},
    "per-layer": {"clipping": "per-layer"},
    "rep": {"mechanism": "rep"},
    "spectral": {"mechanism": "spectral"},
    "adam-bc": {"optimizer": "adam-bc", "lr": 0.01},
    "james-stein": {"denoise": "james-stein"},
    "steerable": {"model": "c8-tiny"},
    "standardised": {"model": "resnet20"},
}


def session(**options) -> Session:
    rng = np.random.default_rng(0)
    dataset = Dataset(
        "made-up", rng.normal(size=(120, 1, 8, 8)).astype("float32"), rng.integers(0, 10, 120), None, None, 10,
        unit=rng.integers(0, 60, 120) if "unit" in options else None,
    )  # fmt: skip
    common = {"model": "cnn", "batch": 12, "steps": 4, "noise_multiplier": 1.0, "epsilon": None, "device": "cpu"}
    return Session(TrainConfig(**{**common, **options}), dataset)


def watched_step(made: Session, release: bool = True) -> None:
    parts = made._parts()
    for k, (rows, owner, moves) in enumerate(parts):
        made._announce(rows, owner, k == 0, release and k == len(parts) - 1)
        made.training.tape.blind = True
        with followed(), Watch("cpu"):
            made.backward(made.inputs[rows], made.y[rows], moves, owner)
            made.optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_of_the_device(name):
    made = session(**CASES[name])
    made.step()
    watched_step(made)


def test_an_adaptive_bound_asks_once_a_release_and_not_once_a_part():
    made = session(clipping="adaptive", max_physical_batch=4)
    watched_step(made, release=False)
    with pytest.raises(Unrecordable), Watch("cpu"):
        made.training.release()


def test_rows_per_owner_are_counted_exactly():
    rows = RowMap.of(torch.tensor([0] * 600 + [-1, 7, 7]))
    factor = rows.row_factor(torch.empty(0, dtype=torch.float64))
    assert factor.tolist() == [1 / 600] * 600 + [0.0, 0.5, 0.5]
    assert RowMap.of(torch.tensor([-1, -1])).row_factor(torch.empty(0)).tolist() == [0.0, 0.0]
