"""What training needs of a data set, and the registry of names.

Pixels are scaled by constants that are public (the range of the format), never by statistics of private records.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_DATASETS: dict[str, Callable[[], Dataset]] = {}


class DataError(ValueError):
    """The data cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Dataset:
    """Images [N, C, H, W] in float32 and integer labels. The test set is *public*: its accuracy is printed as it is."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None
    y_test: np.ndarray | None
    classes: int
    unit: np.ndarray | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    def __len__(self) -> int:
        return len(self.x_train)

    def fingerprint(self) -> str:
        """SHA-256 over the private records in order: says *which* data a budget was spent on, not what it holds."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train):
            digest.update(f"{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def register_dataset(name: str) -> Callable[[Callable[[], Dataset]], Callable[[], Dataset]]:
    """Make ``load() -> Dataset`` known by name."""

    def add(loader: Callable[[], Dataset]) -> Callable[[], Dataset]:
        _DATASETS[name] = loader
        return loader

    return add


def datasets() -> list[str]:
    return sorted(_DATASETS)


def load(source: str | Path, unit: str | None = None) -> Dataset:
    """A registered name, or the path of an ``.npz`` file with x_train, y_train (and x_test, y_test; labels ``unit``)."""
    if str(source) in _DATASETS:
        if unit is not None:
            raise DataError(f"data set {source!r} has no column {unit!r}: its unit of privacy is the record")
        return _DATASETS[str(source)]()
    path = Path(source)
    if path.suffix != ".npz":
        raise DataError(f"data is {str(source)!r}; give a name ({', '.join(datasets())}) or an .npz file")
    if not path.is_file():
        raise DataError(f"no file at {path}; give the path of an .npz file with x_train and y_train")
    return from_arrays(path.stem, read_npz(path), unit)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:
        why = "it holds objects, not arrays of numbers" if "pickle" in str(error) else str(error)
        raise DataError(f"{path} cannot be read as .npz: {why}; save it with np.savez") from error


def from_arrays(name: str, arrays: dict[str, np.ndarray], unit: str | None = None) -> Dataset:
    """Checks shapes, labels and finiteness; scales uint8 pixels to [−1, 1]."""
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise DataError(f"{name} has no array {key!r} (it has {sorted(arrays)}); save it with np.savez(…, {key}=…)")
    y_train = _labels(name, "y_train", arrays["y_train"], len(arrays["x_train"]))
    x_test, y_test = arrays.get("x_test"), arrays.get("y_test")
    classes = int(y_train.max()) + 1
    if (x_test is None) != (y_test is None):
        raise DataError(f"{name} has only one of x_test and y_test; give both or neither")
    if x_test is not None and y_test is not None:
        y_test = _labels(name, "y_test", y_test, len(x_test))
        classes = max(classes, int(y_test.max(initial=0)) + 1)
        x_test = _images(name, "x_test", x_test)
    if classes < 2:
        raise DataError(f"{name} has one class only; a classifier needs at least two")
    labels = None
    if unit is not None:
        if unit not in arrays:
            raise DataError(f"{name} has no array {unit!r} for the unit of privacy (it has {sorted(arrays)})")
        labels = arrays[unit]
    x_train = _images(name, "x_train", arrays["x_train"])
    if x_test is not None and x_test.shape[1:] != x_train.shape[1:]:
        raise DataError(f"{name}: x_test has shape {x_test.shape[1:]} per image, x_train {x_train.shape[1:]}")
    return Dataset(name, x_train, y_train, x_test, y_test, classes, labels)


def _images(name: str, key: str, x: np.ndarray) -> np.ndarray:
    if not len(x):
        raise DataError(f"{name}: {key} is empty; there is nothing to train on")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4:
        raise DataError(f"{name}: {key} has shape {x.shape}; expected N×H×W, N×H×W×C or N×C×H×W")
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x, dtype=np.float32) / 127.5 - 1.0
    x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))
        raise DataError(
            f"{name}: {key} holds values that are not finite, first in record {bad[0]} ({len(bad)} records)"
        )
    return x


def _labels(name: str, key: str, y: np.ndarray, rows: int) -> np.ndarray:
    if not rows:
        raise DataError(f"{name}: there are no images for {key}; there is nothing to train on")
    if y.shape != (rows,):
        raise DataError(f"{name}: {key} has shape {y.shape} for {rows} images; give one integer label per image")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{name}: {key} holds {y.dtype}, but labels must be integers ≥ 0; save it with .astype(int)")
    if y.min() < 0 or y.max() >= 1_000_000:
        raise DataError(f"{name}: {key} must hold integers ≥ 0 and below a million, got {y.min()} to {y.max()}")
    return y.astype(np.int64)


@register_dataset("digits")
def digits() -> Dataset:
    """scikit-learn's handwritten digits: 1,797 images of 8×8, every fifth one kept for the public test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 1, 8, 8) / 8.0 - 1.0).astype(np.float32)
    test = np.arange(len(x)) % 5 == 4
    y: Any = labels.astype(np.int64)
    return Dataset("digits", x[~test], y[~test], x[test], y[test], 10)


def _stored(name: str) -> Callable[[], Dataset]:
    def read() -> Dataset:
        root = os.environ.get("ERLANGEN_DATA")
        path = Path(root or ".") / f"{name}.npz"
        if root is None or not path.is_file():
            raise DataError(f"data set {name!r} was not found: set ERLANGEN_DATA to the folder that holds {name}.npz")
        return from_arrays(name, read_npz(path))

    return read


for _name in ("mnist", "fashion_mnist", "cifar10"):
    register_dataset(_name)(_stored(_name))
