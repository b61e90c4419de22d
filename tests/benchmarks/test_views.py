"""The benchmark of averaged answers compares the two on the same images, and refuses a run that has no views."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from erlangen.deploy.card import load_run
from erlangen.training import TrainConfig
from erlangen.training.run import train
from tests.scripts import script

bench = script("views")


def trained(folder, augment: str):
    config = TrainConfig(
        data="digits", model="cnn", noise_multiplier=1.0, epsilon=None, batch=100, steps=3, augment=augment, evaluations=1, seed=0
    )
    train(config, folder, say=lambda _: None)
    return folder


def test_both_accuracies_and_a_paired_interval(tmp_path) -> None:
    folder = trained(tmp_path / "run", "shift")
    row = bench.compare(folder, rows=64)
    data = bench.load_data(TrainConfig.from_file(folder / "config.json"))
    x, y = torch.from_numpy(data.x_test), data.y_test
    with torch.no_grad():
        right = [(load_run(folder, average)[0](x).argmax(1).numpy() == y).astype(float) for average in (False, True)]
    gain = right[1] - right[0]
    assert row["single"]["test_accuracy"] == pytest.approx(right[0].mean())
    assert row["averaged"]["test_accuracy"] == pytest.approx(right[1].mean())
    assert row["gain"] == pytest.approx(gain.mean())
    assert row["half_width_95"] == pytest.approx(1.96 * np.std(gain, ddof=1) / len(y) ** 0.5)
    assert (row["views"], row["images"]) == (5, len(y))


def test_a_run_without_views_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="augment is 'none'"):
        bench.compare(trained(tmp_path / "run", "none"))
