"""What training needs of a data set, and the registry of names.

Pixels are scaled by constants that are public (the range of the format), never by statistics of private records.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from erlangen.data.options import DataOptions
from erlangen.data.preprocessing import DataError, Preprocessing
from erlangen.spelling import hint

__all__ = ["DataError", "Dataset", "datasets", "load", "register_dataset", "renormalised"]

_DATASETS: dict[str, Callable[[], Dataset]] = {}


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
    class_names: tuple[str, ...] = ()
    #: how pixels became ``x``; None where nobody said
    preprocessing: Preprocessing | None = None
    #: what the owner of the data should know about how it was read
    notes: tuple[str, ...] = ()
    #: fingerprint of the records as they were before any normalisation, if it is not that of ``x_train``
    source: str | None = None
    #: whether nothing but private labels says how many classes there are: then one record can change their number
    classes_from_labels: bool = False
    #: whether nothing but private images says whether the network sees colours: then one record can change its shape
    channels_from_images: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    def __len__(self) -> int:
        return len(self.x_train)

    @property
    def unit_count(self) -> int:
        """How many are protected: records, or their owners where ``unit`` says whose they are."""
        return len(self) if self.unit is None else len(np.unique(np.asarray(self.unit)))

    def fingerprint(self) -> str:
        """SHA-256 over the private records in order: says *which* data a budget was spent on, not what it holds."""
        if self.source is not None:
            return self.source
        return digest_of(self.x_train, self.y_train)


def digest_of(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def register_dataset(name: str) -> Callable[[Callable[[], Dataset]], Callable[[], Dataset]]:
    """Make ``load() -> Dataset`` known by name."""

    def add(loader: Callable[[], Dataset]) -> Callable[[], Dataset]:
        _DATASETS[name] = loader
        return loader

    return add


@contextmanager
def replaced_datasets(loaders: Mapping[str, Callable[[], Dataset]]) -> Iterator[None]:
    """Other loaders for these names, until the end of the block."""
    before = dict(_DATASETS)
    _DATASETS.update(loaders)
    try:
        yield
    finally:
        for name in loaders:
            _DATASETS.pop(name, None)
            if name in before:
                _DATASETS[name] = before[name]


def datasets() -> list[str]:
    return sorted(_DATASETS)


def load(source: str | Path, unit: str | None = None, **options: Any) -> Dataset:
    """A registered name, a folder of class folders, or arrays: an ``.npz`` file, or ``.npy`` files beside each other.

    ``unit`` names whose privacy is protected: an array of the file, or what ``unit_pattern``/``unit_csv`` say of images.
    ``options`` are those of `DataOptions`. ``normalise="private"`` is a release and happens in training: here the
    pixels stay at 0.5/0.5.
    """
    chosen = DataOptions.of(options)
    if str(source) in _DATASETS:
        chosen.refuse_for_named(str(source))
        if unit is not None:
            raise DataError(f"data set {source!r} has no column {unit!r}: its unit of privacy is the record")
        dataset = _DATASETS[str(source)]()
        constants = chosen.constants()
        return dataset if constants is None else renormalised(dataset, *constants)
    if unit is None and (chosen.unit_pattern or chosen.unit_csv):
        given = "unit_pattern" if chosen.unit_pattern else "unit_csv"
        raise DataError(f"{given} says whose each image is, but unit is not given: without it each image is protected by itself. "
                        "Give unit (--unit patient, say)")  # fmt: skip
    return _own(Path(source), unit, chosen)


def _own(path: Path, unit: str | None, options: DataOptions) -> Dataset:
    from erlangen.data.arrays import from_arrays, read_npy_folder, read_npz
    from erlangen.data.folder import read_folder

    if path.is_dir():
        if (path / "x_train.npy").is_file():
            return from_arrays(path.resolve().name, read_npy_folder(path), unit, options)
        return read_folder(path, unit, options)
    if path.suffix not in (".npz", ".npy"):
        known, there = ", ".join(datasets()), "which is no .npz file" if path.exists() else "which is nowhere"
        raise DataError(
            f"data is {str(path)!r}, {there}; give a name ({known}), a folder of class folders, or an .npz file."
            f"{hint(str(path), datasets())}"
        )
    if not path.is_file():
        raise DataError(f"no file at {path}; give the path of an .npz file with x_train and y_train")
    if path.suffix == ".npy":
        return from_arrays(path.resolve().parent.name, read_npy_folder(path.parent), unit, options)
    return from_arrays(path.stem, read_npz(path), unit, options)


def renormalised(dataset: Dataset, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """The same pixels with other constants. The fingerprint stays: it is the same data."""
    before = dataset.preprocessing
    if before is None:
        raise DataError(f"data set {dataset.name!r} does not say how its pixels were scaled; normalise it yourself")
    after = dataclasses.replace(before, mean=mean, std=std)

    def changed(x: np.ndarray) -> np.ndarray:
        return after.normalise(before.denormalise(x))

    return dataclasses.replace(
        dataset,
        x_train=changed(dataset.x_train),
        x_test=None if dataset.x_test is None else changed(dataset.x_test),
        preprocessing=after,
        source=dataset.fingerprint(),
    )


@register_dataset("digits")
def digits() -> Dataset:
    """scikit-learn's handwritten digits: 1,797 images of 8×8, every fifth one kept for the public test."""
    images, labels = _digits()
    x = (images.reshape(-1, 1, 8, 8) / 8.0 - 1.0).astype(np.float32)
    test = np.arange(len(x)) % 5 == 4
    y: Any = labels.astype(np.int64)
    names = tuple(str(k) for k in range(10))
    return Dataset(
        "digits", x[~test], y[~test], x[test], y[test], 10, class_names=names, preprocessing=Preprocessing(1, 8, 8)
    )


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """As they are stored: read once, because that is text, and only copied from."""
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)
