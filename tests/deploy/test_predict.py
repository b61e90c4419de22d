"""Predictions do what training did: the same pixels, the same classes, and radii that hold."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from erlangen.data import DataError, load
from erlangen.deploy.card import ModelCard, load_run
from erlangen.deploy.predict import predict
from erlangen.training import TrainConfig, run
from erlangen.training.config import ConfigError
from erlangen.training.validate import validate


def write_digits(root, count=300):
    """Digits as PNGs in folders whose order by name is not that of the numbers."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for i, (image, label) in enumerate(zip(images[:count], labels[:count])):
        folder = root / ("train" if i % 5 else "test") / f"class {(7 * label) % 10} is {label}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(image.reshape(8, 8) * 16, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"p{i // 2:03d}_{i}.png")
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits):
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {"normalise": "0.3/0.4"}
    config = TrainConfig(
        data=str(digits), model="mlp", steps=60, batch=128, epsilon=None, noise_multiplier=0.5, evaluations=1, data_options=options
    )
    run.train(config, folder, say=lambda text: None)
    return folder


def test_files_folders_and_arrays_get_the_same_answers(trained, digits, tmp_path):
    model, card = load_run(trained)
    data = load(digits, normalise="0.3/0.4")
    with torch.no_grad():
        expected = model(torch.from_numpy(data.x_test)).softmax(1).numpy()
    counts: list[int] = []
    found = predict(model, card, [digits / "test"], batch=7, told=counts.append)
    assert counts == [*range(7, 60, 7), 60], "how far it is"
    assert [row.label for row in found.rows] == [data.class_names[k] for k in expected.argmax(1)]
    np.testing.assert_allclose([row.probabilities for row in found.rows], expected, atol=1e-6)
    assert np.mean([row.label in row.input for row in found.rows]) > 0.5  # it has learnt something, under its own names
    pixels = np.rint(data.preprocessing.denormalise(data.x_test)[:, 0] * 255).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=pixels)
    np.save(tmp_path / "b.npy", pixels[0])
    again = predict(model, card, [tmp_path / "a.npz", tmp_path / "b.npy"])
    assert again.rows[0].input.endswith("a.npz[0]")
    np.testing.assert_allclose([r.probabilities for r in again.rows[:-1]], expected, atol=1e-6)
    np.testing.assert_allclose(again.rows[-1].probabilities, expected[0], atol=1e-6)


def test_sixteen_bits_of_grey_are_answered_as_eight_are(trained, digits, tmp_path):
    """257 · v of 65535 is the same grey as v of 255."""
    model, card = load_run(trained)
    eight = next((digits / "test").rglob("*.png"))
    pixels = np.asarray(Image.open(eight)).astype(np.uint16)
    Image.fromarray(pixels * 257).save(tmp_path / "deep.png")
    assert Image.open(tmp_path / "deep.png").mode.startswith("I")
    np.save(tmp_path / "deep.npy", pixels * 257)
    one, deep, array = (predict(model, card, [path]).rows[0] for path in (eight, tmp_path / "deep.png", tmp_path / "deep.npy"))
    for other in (deep, array):
        np.testing.assert_allclose(other.probabilities, one.probabilities, atol=1e-6)
    Image.fromarray(pixels).save(tmp_path / "dark.png")  # the broken twin: the same numbers are nearly black in 16 bits
    dark = predict(model, card, [tmp_path / "dark.png"]).rows[0]
    assert np.abs(np.log(dark.probabilities) - np.log(one.probabilities)).max() > 0.01


def test_wrong_constants_would_be_noticed(trained, digits):
    """The broken twin: default constants give other probabilities."""
    model, card = load_run(trained)
    first = next((digits / "test").rglob("*.png"))
    import dataclasses

    other = dataclasses.replace(card, preprocessing=dataclasses.replace(card.preprocessing, mean=(0.5,), std=(0.5,)))
    a, b = (predict(model, c, [first]).rows[0].probabilities for c in (card, other))
    assert np.abs(np.log(a) - np.log(b)).max() > 0.01  # a confident model hides it in the probabilities themselves


def test_bad_inputs_are_named(trained, digits, tmp_path):
    model, card = load_run(trained)
    good = next((digits / "test").rglob("*.png"))
    Image.new("L", (30, 20)).save(tmp_path / "large.png")
    (tmp_path / "words.png").write_text("hello")
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    np.save(tmp_path / "float.npy", np.zeros((2, 8, 8), np.float32))
    inputs = [good, tmp_path / "large.png", tmp_path / "words.png", tmp_path / "two.npz", tmp_path / "float.npy", "none.png"]
    with pytest.raises(DataError, match=r"(?s)5 input\(s\).*30×20 pixels, not 8×8; --resize.*is not an image.*--key"):
        predict(model, card, inputs)
    found = predict(model, card, inputs, skip_bad=True)
    assert (len(found.rows), len(found.skipped)) == (1, 5)
    assert "save uint8" in dict(found.skipped)[str(tmp_path / "float.npy")]
    assert len(predict(model, card, [tmp_path / "large.png"], resize=True).rows) == 1
    (tmp_path / "notes.txt").write_text("no image")
    assert str(tmp_path / "notes.txt") in predict(model, card, [tmp_path], resize=True, skip_bad=True).aside
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is 'cuda'"):
            predict(model, card, [good], device="cuda")
    with pytest.raises(ConfigError, match="device is 'cudo'; give cpu"):
        predict(model, card, [good], device="cudo")
    with pytest.raises(DataError, match="no image to predict"):
        predict(model, card, ["none.png"], skip_bad=True)


def test_tables_keep_every_name(trained, digits):
    model, card = load_run(trained)
    found = predict(model, card, [digits / "test"])
    rows = list(csv.reader(io.StringIO("\n".join(",".join(f'"{c}"' for c in row) for row in found.table()))))
    assert rows[0][3:] == [f"p({name})" for name in card.labels]
    assert len(rows) == len(found.rows) + 1
    values = found.to_json()["predictions"][0]
    assert values["probabilities"][values["class"]] == values["probability"]
    assert sum(values["probabilities"].values()) == pytest.approx(1.0)


def test_a_model_of_arrays_takes_arrays_only(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x_train=rng.normal(size=(40, 4, 4)), y_train=np.arange(40) % 2)
    few = {"steps": 2, "batch": 10, "evaluations": 1, "epsilon": None, "noise_multiplier": 1.0}
    run.train(TrainConfig(data=str(tmp_path / "own.npz"), model="logistic", **few), tmp_path / "run")
    model, card = load_run(tmp_path / "run")
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="trained on arrays"):
        predict(model, card, [tmp_path / "a.png"])
    assert len(predict(model, card, [tmp_path / "own.npz"]).rows) == 40
    assert card.labels == ("0", "1")


def test_radii_of_lipschitz_models_hold(tmp_path):
    """No step of that length in pixels, along the worst direction that gradients find, changes the class."""
    options = {"normalise": "0.5/0.25"}
    config = TrainConfig(
        model="lipschitz-lenet", mechanism="clipless", steps=20, batch=256, epsilon=None, noise_multiplier=0.3, evaluations=1,
        data_options=options,
    )  # fmt: skip
    run.train(config, tmp_path / "run")
    model, card = load_run(tmp_path / "run")
    pixels = np.rint(np.random.default_rng(0).uniform(0, 255, (20, 8, 8))).astype(np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    found = predict(model, card, [tmp_path / "x.npy"])
    radii = torch.tensor([row.radius for row in found.rows])
    assert (radii >= 0).all()
    assert radii.max() > 0
    x = torch.from_numpy(pixels[:, None] / np.float32(255))
    normalise = lambda p: (p - 0.5) / 0.25  # noqa: E731
    label = torch.tensor([row.index for row in found.rows])
    moved = x.clone().requires_grad_()
    for _ in range(20):
        logits = model(normalise(moved))
        others = logits.scatter(1, label[:, None], -1e9).amax(1)
        (others - logits.gather(1, label[:, None])[:, 0]).sum().backward()
        with torch.no_grad():
            step = moved.grad / moved.grad.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
            moved += step * radii.view(-1, 1, 1, 1) / 5
            away = moved - x
            length = away.flatten(1).norm(dim=1).clamp(min=1e-12)
            moved.copy_(x + away * (radii / length).clamp(max=1.0).view(-1, 1, 1, 1).float())
        moved.grad = None
    with torch.no_grad():
        assert torch.equal(model(normalise(moved)).argmax(1)[radii > 0], label[radii > 0])


def test_cards_survive_and_damaged_ones_are_refused(trained, tmp_path):
    card = ModelCard.read(trained)
    card.save(tmp_path)
    assert ModelCard.read(tmp_path) == card
    values = json.loads((tmp_path / "model.json").read_text())
    for change, words in (
        ({"format": "other"}, "not in the format"),
        ({"classes": 3}, "10 class names for 3"),
        ({"extra": 1}, "cannot be read"),
        ({"preprocessing": {"mean": [0.5], "std": [0.0], "channels": 1, "height": 8, "width": 8}}, "above 0"),
    ):
        (tmp_path / "model.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(DataError, match=words):
            ModelCard.read(tmp_path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(DataError, match=r"no model\.json"):
        ModelCard.read(tmp_path)


def test_private_validation_reads_images_as_the_run_did(trained, digits, tmp_path):
    """Folders with fewer classes keep the numbers of the run; without noise it is the plain accuracy."""
    import shutil

    chosen = sorted((digits / "test").iterdir())[3:6]
    for folder in chosen:
        shutil.copytree(folder, tmp_path / "private" / folder.name)
    result = validate(trained, tmp_path / "private", 0.0)
    model, card = load_run(trained)
    found = predict(model, card, [tmp_path / "private"])
    assert result["accuracy"] == pytest.approx(np.mean([row.label in row.input for row in found.rows]))
    shutil.copytree(chosen[0], tmp_path / "other" / "horse")
    shutil.copytree(chosen[1], tmp_path / "other" / "cow")
    with pytest.raises(DataError, match="has the class 'cow'"):
        validate(trained, tmp_path / "other", 0.0)
