"""Answers averaged over views: the mean probability of views that training knows, wherever answers are asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.data import Dataset
from erlangen.data.augment import KINDS, draw, views
from erlangen.deploy.averaged import Averaged, rows_at_once
from erlangen.deploy.card import load_run
from erlangen.deploy.export import export
from erlangen.deploy.predict import predict
from erlangen.training import TrainConfig
from erlangen.training.config import ConfigError
from erlangen.training.folder import stream_id
from erlangen.training.run import resume, train
from erlangen.training.session import Session
from erlangen.training.validate import validate

MOVING = [name for name, kind in KINDS.items() if kind.margin]


class Linear(nn.Module):
    """Logits that differ between views, and one whose probability float32 cannot tell from nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.randn(4, 2 * 9 * 9)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T - torch.tensor([0.0, 0.0, 0.0, 250.0])


@pytest.mark.parametrize("augment", MOVING)
def test_it_is_the_mean_probability_of_views_that_training_draws(augment: str) -> None:
    x, model = torch.randn(3, 2, 9, 9), Linear()
    averaged = Averaged(model, augment)
    found = averaged.views(x)
    assert len(found) == averaged.count
    assert sum(torch.equal(view, x) for view in found) == 1
    expected = torch.stack([model(view).double().softmax(1) for view in found]).mean(0)
    assert expected.min() < 1e-60
    torch.testing.assert_close(averaged(x).double(), expected.log(), rtol=1e-4, atol=1e-4)
    margin, reach = KINDS[augment].margin, averaged.reach
    spots = [(0, 0), *((down, right) for down in (-reach, reach) for right in (-reach, reach))]
    places = [(*spot, flip) for flip in range(1 + averaged.mirror) for spot in spots]
    for (down, right, flip), view in zip(places, found, strict=True):
        moves = draw(3, 1, augment, torch.Generator().manual_seed(0))
        moves[:] = torch.tensor([margin + down, margin + right, flip, 256])
        assert torch.equal(view, views(x, 1, augment, moves))


def test_every_row_is_answered_by_itself() -> None:
    x, averaged = torch.randn(5, 2, 9, 9), Averaged(Linear(), "flip-crop")
    torch.testing.assert_close(averaged(x)[3:4], averaged(x[3:4]))
    assert rows_at_once(averaged, 1024) * averaged.count <= 1024 < (rows_at_once(averaged, 1024) + 1) * averaged.count
    assert rows_at_once(averaged, 1) == 1
    assert rows_at_once(Linear(), 1024) == 1024


def test_without_moved_images_in_training_there_are_no_views() -> None:
    with pytest.raises(ConfigError, match="average_views is True; give an augment that moves them"):
        TrainConfig(average_views=True)
    with pytest.raises(ValueError, match=r"augment is 'none'.*train with augment shift, flip-crop"):
        Averaged(Linear(), "none")


def images(count: int) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 1, 10, 10)).astype(np.float32)
    y = (x[:, 0, :5].mean((1, 2)) > x[:, 0, 5:].mean((1, 2))).astype(np.int64)
    return Dataset("images", x, y, x[:40] + 0.1, y[:40], 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = TrainConfig(
        noise_multiplier=1.0, epsilon=None, batch=50, steps=4, augment="flip-crop", views=2, average_views=True, evaluations=1,
        seed=0,
    )  # fmt: skip
    train(config, folder, dataset=images(200))
    return folder


def test_a_run_evaluates_predicts_and_exports_its_averaged_answers(trained: Path, tmp_path: Path) -> None:
    data = images(200)
    x, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    averaged, card = load_run(trained)
    single, _ = load_run(trained, average_views=False)
    with torch.no_grad():
        expected, alone = averaged(x), single(x)
    assert not torch.allclose(expected.softmax(1), alone.softmax(1), atol=1e-3)
    summary = json.loads((trained / "summary.json").read_text())["test"]
    assert summary["test_accuracy"] == pytest.approx(float((expected.argmax(1) == y).float().mean()))
    assert summary["single_view_accuracy"] == pytest.approx(float((alone.argmax(1) == y).float().mean()))
    assert summary["test_loss"] == pytest.approx(float(F.cross_entropy(expected, y)), rel=1e-4)
    np.save(tmp_path / "x.npy", data.x_test)
    rows = predict(averaged, card, [tmp_path / "x.npy"], batch=40).rows
    np.testing.assert_allclose([r.probabilities for r in rows], expected.double().softmax(1), atol=1e-5)
    assert export(trained, out=tmp_path / "averaged").difference <= 1e-5
    assert export(trained, out=tmp_path / "single", average_views=False).difference <= 1e-5
    said = [json.loads((tmp_path / name / "model.json").read_text()).get("answers") for name in ("averaged", "single")]
    assert said == ["averaged over 10 views of each image", None]
    assert "flip" in (tmp_path / "averaged" / "model.py").read_text()
    assert "flip" not in (tmp_path / "single" / "model.py").read_text()


def test_validation_counts_averaged_answers(trained: Path, tmp_path: Path) -> None:
    data = images(60)
    np.savez(tmp_path / "other.npz", x_train=data.x_train, y_train=data.y_train)
    right = validate(trained, tmp_path / "other.npz", noise_multiplier=0.0)["accuracy"]
    with torch.no_grad():
        predicted = load_run(trained)[0](torch.from_numpy(data.x_train)).argmax(1)
    assert right == pytest.approx(float((predicted.numpy() == data.y_train).mean()), abs=1e-6)


def test_nothing_that_is_released_depends_on_it(trained: Path) -> None:
    data = images(200)
    config = replace(TrainConfig.from_file(trained / "config.json"), data="images")
    other = replace(config, average_views=False)
    assert stream_id(config, data) == stream_id(other, data)
    weights = []
    for each in (config, other):
        session = Session(each, data, "run")
        for _ in range(2):
            session.step()
        weights.append(torch.cat([w.flatten() for w in session.weights().values()]))
    assert torch.equal(*weights)
    assert resume(trained, dataset=data, say=lambda _: None).summary["complete"]
