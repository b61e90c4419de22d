"""Runs that were trained together, as `erlangen reproduce` does, can be reported on like others."""

from __future__ import annotations

import numpy as np
import pytest

import erlangen.data.base
from erlangen.data import Dataset
from erlangen.experiments.presets import Cell, Preset
from erlangen.experiments.runner import run_preset
from erlangen.report import build, collect
from erlangen.training import TrainConfig


def test_trained_together_and_reported(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (60, 1, 8, 8)).astype(np.float32), np.arange(60) % 2
    data = Dataset("toy", x, y, x[:20], y[:20], 2)
    monkeypatch.setitem(erlangen.data.base._DATASETS, "toy", lambda: data)
    config = TrainConfig(
        data="toy", model="c8-cnn", model_options={"field_counts": [1], "kernel_size": 3}, epsilon=None, mechanism="rep",
        noise_multiplier=1.0, batch=8, steps=3, lr=0.1, momentum=0.0, device="cpu",
    )  # fmt: skip
    run_preset(Preset("toy", "nobody", "toy", 60, (Cell("REP", config),), seeds=2, together=True), tmp_path)
    runs = collect(sorted(p for p in tmp_path.iterdir() if p.is_dir()))
    assert len(runs) == 2
    for run in runs:
        right = (run.public.logits.argmax(1) == run.public.labels).float().mean()
        assert float(right) == pytest.approx(run.accuracy)
    keys = set(build(runs, details=1).figures())
    assert {"run1-calibration", "run1-kernels", "run1-predictions"} <= keys
