"""What a run leaves about its public test set agrees with what it says elsewhere."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from erlangen.training import TrainConfig, run
from erlangen.training.public import PublicPredictions, examples

SMALL = TrainConfig(
    model="mlp", model_options={"width": 16}, steps=6, batch=64, seed=0, epsilon=None, noise_multiplier=1.0, evaluations=2,
    optimizer="adam",
)  # fmt: skip


def test_predictions_are_those_of_the_released_weights(tmp_path):
    from erlangen.data import load
    from erlangen.deploy.card import load_model

    summary = run.train(SMALL, tmp_path / "r").summary
    public = PublicPredictions.load(tmp_path / "r")
    data = load("digits")
    assert public is not None
    assert public.logits.shape == (len(data.y_test), 10)
    assert float((public.logits.argmax(1) == public.labels).float().mean()) == summary["test"]["test_accuracy"]
    model = load_model(tmp_path / "r", tuple(summary["data"]["input_shape"]), summary["data"]["classes"])
    torch.testing.assert_close(model(torch.from_numpy(data.x_test)).detach(), public.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(public.images.numpy(), data.x_test[public.shown.numpy()])


def test_examples_show_every_class_and_then_the_surest_mistakes():
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 9.0], [2.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0, 0])
    assert examples(logits, labels, 6).tolist() == [0, 1, 3, 2]
    assert examples(logits, labels, 3).tolist() == [0, 3, 2]


def test_without_a_public_test_set_nothing_is_left(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x_train=rng.normal(size=(80, 6, 6)).astype(np.float32), y_train=np.arange(80) % 2)
    run.train(dataclasses.replace(SMALL, data=str(tmp_path / "d.npz"), batch=16), tmp_path / "r")
    assert PublicPredictions.load(tmp_path / "r") is None
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["data"]["input_shape"] == [1, 6, 6]


@pytest.mark.parametrize(
    "change",
    [{"labels": torch.tensor([7, 0])}, {"labels": torch.zeros(3, dtype=torch.int64)}, {"shown": torch.tensor([5])}],
)
def test_a_file_that_does_not_fit_together_is_refused(tmp_path, change):
    good = PublicPredictions(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(1, 1, 4, 4), torch.tensor([0]))
    dataclasses.replace(good, **change).save(tmp_path)
    with pytest.raises(ValueError, match="remove it"):
        PublicPredictions.load(tmp_path)
    (tmp_path / "public.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        PublicPredictions.load(tmp_path)
