"""Loaders read small files written in the formats of the real archives."""

from __future__ import annotations

import numpy as np
import pytest

from erlangen.data import load
from erlangen.data.archives import read_image
from erlangen.data.base import DataError


def write_cifar100(folder, rows: int, name: str, seed: int):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
    coarse, fine = rng.integers(0, 20, rows, dtype=np.uint8), (np.arange(rows) * 33 % 100).astype(np.uint8)
    np.hstack([coarse[:, None], fine[:, None], pixels.reshape(rows, -1)]).tofile(folder / name)
    return pixels, fine


def test_cifar100(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    pixels, fine = write_cifar100(folder, 6, "train.bin", 0)
    write_cifar100(folder, 3, "test.bin", 1)
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    data = load("cifar100")
    assert data.x_train.shape == (6, 3, 32, 32)
    assert data.x_test.shape == (3, 3, 32, 32)
    assert np.array_equal(data.y_train, fine)
    np.testing.assert_allclose(data.x_train, pixels / 127.5 - 1, atol=1e-6)
    with open(folder / "test.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="3074 per image"):
        load("cifar100")


def test_an_npz_of_the_same_name_works_too(tmp_path, monkeypatch):
    x = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar100.npz", x_train=x, y_train=np.arange(4))
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    assert load("cifar100").x_train.shape == (4, 3, 32, 32)


@pytest.mark.parametrize("name", ["cifar100", "tiny_imagenet_200", "imagenette"])
def test_what_is_missing_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ERLANGEN_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"{name}.*ERLANGEN_DATA"):
        load(name)


def save(path, size=(64, 64), colour=(200, 30, 30)):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, colour).save(path)


def test_tiny_imagenet(tmp_path, monkeypatch):
    root = tmp_path / "tiny-imagenet-200"
    for k, name in enumerate(("n01", "n02")):
        for i in range(2):
            save(root / "train" / name / "images" / f"{name}_{i}.JPEG", colour=(250 * k, 0, 0))
    save(root / "val" / "images" / "val_0.JPEG", colour=(250, 0, 0))
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    data = load("tiny_imagenet_200")
    assert data.x_train.shape == (4, 3, 64, 64)
    assert data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [1]
    assert abs(data.x_test[0, 0].mean() - data.x_train[3, 0].mean()) < 0.05


def test_imagenette_takes_the_middle(tmp_path, monkeypatch):
    root = tmp_path / "imagenette2-160"
    for part in ("train", "val"):
        for name in ("n01", "n02"):
            save(root / part / name / "a.JPEG", size=(213, 160))
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    data = load("imagenette")
    assert data.x_train.shape == data.x_test.shape == (2, 3, 160, 160)
    save(tmp_path / "small.png", size=(20, 10))
    assert read_image(tmp_path / "small.png", 16).shape == (3, 16, 16)
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(DataError, match=r"broken\.png is not an image"):
        read_image(tmp_path / "broken.png", 16)
