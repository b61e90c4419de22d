"""Rotations turn the right way, keep the background, and depend on a public seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.data import datasets, load
from erlangen.data.base import DataError, Dataset
from erlangen.data.rotated import TEST_12K, TRAIN_12K, read_amat, rotate, rotated
from erlangen.equivariant import transform


def blob(size: int = 29) -> torch.Tensor:
    """A smooth, lopsided picture that fades to the background well inside the image."""
    axis = torch.linspace(-1, 1, size, dtype=torch.float64)
    y, x = torch.meshgrid(-axis, axis, indexing="ij")
    return (2 * torch.exp(-20 * ((x - 0.35) ** 2 + 2 * (y - 0.1) ** 2)) - 1)[None, None]


@settings(max_examples=20, deadline=None)
@given(k=st.integers(-16, 16), size=st.integers(1, 9))
def test_multiples_of_90_degrees_are_exact(k, size):
    x = torch.randn(2, 1, size, size)
    assert torch.equal(rotate(x, torch.tensor([2 * k, 0])), torch.cat([torch.rot90(x[:1], k, (2, 3)), x[1:]]))


def test_45_degrees_turn_counter_clockwise():
    """The peak at angle α moves to α + 45°, and so on round the circle."""
    axis = torch.linspace(-1, 1, 29, dtype=torch.float64)
    for k in range(8):
        mass = (rotate(blob(), torch.tensor([k])) + 1)[0, 0]
        x, y = float((mass * axis).sum() / mass.sum()), float((mass * -axis[:, None]).sum() / mass.sum())
        angle = np.degrees(np.arctan2(y, x) - np.arctan2(0.1, 0.35))
        assert abs((angle - 45 * k + 180) % 360 - 180) < 0.5, k
        assert abs(float(mass.sum()) / float((blob() + 1).sum()) - 1) < 0.01


def test_two_turns_of_45_degrees_are_nearly_one_of_90():
    twice = rotate(rotate(blob(), torch.tensor([1])), torch.tensor([1]))
    assert (twice - rotate(blob(), torch.tensor([2]))).abs().max() < 0.2  # interpolation blurs a peak of 2


def test_the_background_stays():
    x = torch.full((8, 1, 12, 12), -1.0)
    torch.testing.assert_close(rotate(x, torch.arange(8)), x)


def test_a_turn_the_wrong_way_would_be_caught():
    assert (rotate(blob(), torch.tensor([1])) - rotate(blob(), torch.tensor([-1]))).abs().max() > 0.5


def test_it_is_the_action_of_the_equivariance_checks():
    from erlangen.equivariant import cyclic, trivial_fields

    field = trivial_fields(cyclic(8), 1)
    by_checks = transform(blob() + 1, field, cyclic(8).elements[1])
    torch.testing.assert_close(rotate(blob(), torch.tensor([1])) + 1, by_checks, atol=0.2, rtol=0)


def test_angles_depend_on_seed_and_place_only():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (40, 1, 6, 6)).astype(np.float32), np.arange(40) % 10
    a = rotated(Dataset("toy", x, y, x, y, 10), "turned")
    assert np.array_equal(a.x_train, rotated(Dataset("toy", x, y, None, None, 10), "turned").x_train)
    other = x.copy()
    other[7] = 0.5
    b = rotated(Dataset("toy", other, y, x, y, 10), "turned")
    same = [i for i in range(40) if np.array_equal(a.x_train[i], b.x_train[i])]
    assert same == [i for i in range(40) if i != 7]
    assert not np.array_equal(a.x_train, rotated(Dataset("toy", x, y, x, y, 10), "turned", seed=1).x_train)
    assert not np.array_equal(a.x_train, a.x_test)


def test_rotated_digits_is_there():
    assert {"rotated_mnist", "rotated_fashion_mnist", "rotated_digits", "mnist_rot_12k"} <= set(datasets())
    digits, turned = load("digits"), load("rotated_digits")
    assert turned.x_train.shape == digits.x_train.shape
    assert np.array_equal(turned.y_train, digits.y_train)
    assert np.isfinite(turned.x_train).all()
    assert turned.x_train.min() >= -1
    assert turned.x_train.max() <= 1 + 1e-6


def write_amat(path, rows: int, seed: int):
    rng = np.random.default_rng(seed)
    pixels, labels = rng.uniform(0, 1, (rows, 784)), rng.integers(0, 10, rows)
    np.savetxt(path, np.hstack([pixels, labels[:, None]]), fmt="   %.7e")
    return pixels, labels


def test_the_12k_benchmark_is_read_from_its_own_format(tmp_path, monkeypatch):
    folder = tmp_path / "mnist_rot_12k"
    folder.mkdir()
    pixels, labels = write_amat(folder / TRAIN_12K, 12, 0)
    write_amat(folder / TEST_12K, 5, 1)
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    data = load("mnist_rot_12k")
    assert data.x_train.shape == (12, 1, 28, 28)
    assert data.x_test.shape == (5, 1, 28, 28)
    assert np.array_equal(data.y_train, labels)
    np.testing.assert_allclose(data.x_train[3, 0].T.reshape(-1), 2 * pixels[3] - 1, atol=1e-5)


def test_files_that_are_not_the_benchmark_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("0.1 0.2 0.3 1\n")
    with pytest.raises(DataError, match="4 columns"):
        read_amat(tmp_path / "a")
    (tmp_path / "a").write_text("0.1 7.0 0.3 0.4 1\n")
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        read_amat(tmp_path / "a")
    (tmp_path / "a").write_text("spam\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_amat(tmp_path / "a")
    monkeypatch.setenv("ERLANGEN_DATA", str(tmp_path))
    monkeypatch.setenv("ERLANGEN_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="mnist_rot_12k"):
        load("mnist_rot_12k")
