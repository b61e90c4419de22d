"""Benchmarks in the formats they are published in: CIFAR-100 (binary), Tiny-ImageNet-200 and ImageNette (folders of images).

All are looked for in the folder that ERLANGEN_DATA names, as their archives unpack; ``NAME.npz`` there works as well.
Folders of JPEGs need Pillow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from erlangen.data.base import DataError, Dataset, from_arrays, read_npz, register_dataset

Arrays = dict[str, np.ndarray]


def _archive(name: str, folder: str) -> Callable[[Callable[[Path], Arrays]], Callable[[Path], Arrays]]:
    """Register a reader of the unpacked ``folder``."""

    def add(read: Callable[[Path], Arrays]) -> Callable[[Path], Arrays]:
        def load() -> Dataset:
            root = os.environ.get("ERLANGEN_DATA")
            if root is not None and (Path(root) / f"{name}.npz").is_file():
                return from_arrays(name, read_npz(Path(root) / f"{name}.npz"))
            if root is None or not (Path(root) / folder).is_dir():
                raise DataError(f"data set {name!r} was not found: set ERLANGEN_DATA to the folder that holds {folder}/")
            return from_arrays(name, read(Path(root) / folder))

        register_dataset(name)(load)
        return read

    return add


@_archive("cifar100", "cifar-100-binary")
def cifar100(folder: Path) -> Arrays:
    """Records of a coarse label, a fine label and 3×32×32 bytes; the fine one of 100 classes is used."""

    def part(file: str) -> tuple[np.ndarray, np.ndarray]:
        size = 2 + 3 * 32 * 32
        data = np.fromfile(folder / file, dtype=np.uint8) if (folder / file).is_file() else np.zeros(0, np.uint8)
        if not data.size or data.size % size:
            raise DataError(f"{folder / file} has {data.size} bytes; CIFAR-100 has {size} per image")
        records = data.reshape(-1, size)
        return records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64)

    (x, y), (x_test, y_test) = part("train.bin"), part("test.bin")
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


@_archive("tiny_imagenet_200", "tiny-imagenet-200")
def tiny_imagenet_200(folder: Path) -> Arrays:
    """100,000 images of 64×64 in 200 classes; the official validation set is the test set."""
    classes = _classes(folder / "train")
    train = [(f, k) for k, c in enumerate(classes) for f in _images(folder / "train" / c / "images")]
    notes = folder / "val" / "val_annotations.txt"
    if not notes.is_file():
        raise DataError(f"{notes} is missing: it says the class of every validation image")
    label = {name: k for k, name in enumerate(classes)}
    lines = [line.split("\t") for line in notes.read_text().splitlines() if line]
    test = [(folder / "val" / "images" / line[0], label[line[1]]) for line in lines]
    return _decoded(train, test, 64)


@_archive("imagenette", "imagenette2-160")
def imagenette(folder: Path) -> Arrays:
    """9,469 images in 10 classes, the central 160×160 pixels of each; ``val`` is the test set."""
    classes = _classes(folder / "train")
    parts = [
        [(f, k) for k, c in enumerate(classes) for f in _images(folder / part / c)] for part in ("train", "val")
    ]
    return _decoded(parts[0], parts[1], 160)


def _classes(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder} holds no folders of classes")
    return names


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in (".jpeg", ".jpg", ".png"))


def _decoded(train: Sequence[tuple[Path, int]], test: Sequence[tuple[Path, int]], side: int) -> Arrays:
    arrays: Arrays = {}
    for part, files in (("train", train), ("test", test)):
        if not files:
            raise DataError(f"there are no images in the {part} part")
        arrays[f"x_{part}"] = np.stack([read_image(path, side) for path, _ in files])
        arrays[f"y_{part}"] = np.array([k for _, k in files], dtype=np.int64)
    return arrays


def read_image(path: Path, side: int) -> np.ndarray:
    """The central square of an image as [3, side, side] bytes; one that is too small is enlarged first."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("folders of JPEGs need Pillow: pip install pillow") from error
    try:
        image = Image.open(path).convert("RGB")
    except OSError as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    if min(image.size) < side:
        scale = side / min(image.size)
        image = image.resize((max(side, round(image.width * scale)), max(side, round(image.height * scale))))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    pixels = np.asarray(image.crop((left, top, left + side, top + side)), dtype=np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
