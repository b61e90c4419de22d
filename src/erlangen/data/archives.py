"""Benchmarks in the formats they are published in: IDX, CIFAR's binary records, folders of JPEGs.

``NAME.npz`` with the same arrays works as well; `erlangen.data.store` says where they are looked for.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from erlangen.data.arrays import from_arrays, read_npz
from erlangen.data.base import Dataset, register_dataset
from erlangen.data.images import BadImage, files_under, read
from erlangen.data.preprocessing import DataError, Preprocessing
from erlangen.data.store import obtain

Arrays = dict[str, np.ndarray]


def _published(name: str) -> Callable[[Callable[[Path], Arrays]], Callable[[Path], Arrays]]:
    """Register a reader of the data set's folder."""

    def add(reader: Callable[[Path], Arrays]) -> Callable[[Path], Arrays]:
        def load() -> Dataset:
            place = obtain(name)
            return from_arrays(name, read_npz(place) if place.suffix == ".npz" else reader(place))

        register_dataset(name)(load)
        return reader

    return add


# -- IDX ------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes: two zeros, type 8, the number of dimensions, their sizes (big-endian), the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a gzip file: {error}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an IDX file of bytes; download it again")
    shape = tuple(int.from_bytes(content[4 + 4 * k : 8 + 4 * k], "big") for k in range(content[3]))
    start = 4 + 4 * len(shape)
    if len(content) != start + math.prod(shape):
        raise DataError(f"{path} has {len(content)} bytes where its header promises {start + math.prod(shape)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _idx_parts(folder: Path) -> Arrays:
    def part(prefix: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (read_idx(folder / f"{prefix}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        return images, labels.astype(np.int64)

    (x, y), (x_test, y_test) = part("train"), part("t10k")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


@_published("mnist")
def mnist(folder: Path) -> Arrays:
    """60,000 and 10,000 handwritten digits of 28×28."""
    return {**_idx_parts(folder), "class_names": np.array([str(k) for k in range(10)])}


FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@_published("fashion_mnist")
def fashion_mnist(folder: Path) -> Arrays:
    """60,000 and 10,000 articles of clothing of 28×28."""
    return {**_idx_parts(folder), "class_names": np.array(FASHION)}


# -- CIFAR ----------------------------------------------------------------------------------------------------------


def _records(path: Path, labels: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Records of ``labels`` bytes, of which the last is the class, and 3×32×32 bytes."""
    size = labels + 3 * 32 * 32
    data = np.fromfile(path, dtype=np.uint8) if path.is_file() else np.zeros(0, np.uint8)
    if not data.size or data.size % size:
        raise DataError(f"{path} has {data.size} bytes; {name} has {size} per image")
    records = data.reshape(-1, size)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].astype(np.int64)


def _names(path: Path) -> Arrays:
    if not path.is_file():
        return {}
    return {"class_names": np.array([line.strip() for line in path.read_text().splitlines() if line.strip()])}


@_published("cifar10")
def cifar10(folder: Path) -> Arrays:
    """50,000 and 10,000 images of 32×32 in 10 classes."""
    parts = [_records(folder / f"data_batch_{k}.bin", 1, "CIFAR-10") for k in range(1, 6)]
    x_test, y_test = _records(folder / "test_batch.bin", 1, "CIFAR-10")
    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test, **_names(folder / "batches.meta.txt")}


@_published("cifar100")
def cifar100(folder: Path) -> Arrays:
    """Records of a coarse label, a fine label and 3×32×32 bytes; the fine one of 100 classes is used."""
    x, y = _records(folder / "train.bin", 2, "CIFAR-100")
    x_test, y_test = _records(folder / "test.bin", 2, "CIFAR-100")
    names = _names(folder / "fine_label_names.txt")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test, **names}


# -- folders of JPEGs -----------------------------------------------------------------------------------------------


@_published("tiny_imagenet_200")
def tiny_imagenet_200(folder: Path) -> Arrays:
    """100,000 images of 64×64 in 200 classes; the official validation set is the test set."""
    classes = _classes(folder / "train")
    train = [(f, k) for k, c in enumerate(classes) for f in files_under(folder / "train" / c / "images")[0]]
    notes = folder / "val" / "val_annotations.txt"
    if not notes.is_file():
        raise DataError(f"{notes} is missing: it says the class of every validation image")
    label = {name: k for k, name in enumerate(classes)}
    lines = [line.split("\t") for line in notes.read_text().splitlines() if line]
    test = [(folder / "val" / "images" / line[0], label[line[1]]) for line in lines]
    return {**_decoded(train, test, 64), "class_names": np.array(classes)}


@_published("imagenette")
def imagenette(folder: Path) -> Arrays:
    """9,469 images in 10 classes, the central 160×160 pixels of each; ``val`` is the test set."""
    classes = _classes(folder / "train")
    parts = [
        [(f, k) for k, c in enumerate(classes) for f in files_under(folder / part / c)[0]] for part in ("train", "val")
    ]
    return {**_decoded(parts[0], parts[1], 160), "class_names": np.array(classes)}


def _classes(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder} holds no folders of classes")
    return names


def _decoded(train: Sequence[tuple[Path, int]], test: Sequence[tuple[Path, int]], side: int) -> Arrays:
    arrays: Arrays = {}
    for part, files in (("train", train), ("test", test)):
        if not files:
            raise DataError(f"there are no images in the {part} part")
        arrays[f"x_{part}"] = np.stack([read_image(path, side) for path, _ in files])
        arrays[f"y_{part}"] = np.array([k for _, k in files], dtype=np.int64)
    return arrays


def read_image(path: Path, side: int) -> np.ndarray:
    """The central square of an image as [3, side, side] bytes; it is scaled so that its shorter side fits."""
    try:
        pixels, _ = read(path, Preprocessing(3, side, side, resize=True))
    except (BadImage, OSError) as error:
        raise DataError(f"{path} {error}") from error
    return np.rint(pixels * 255.0).astype(np.uint8)
