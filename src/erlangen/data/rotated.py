"""Rotated images: MNIST, Fashion-MNIST and digits by seeded multiples of 45°, and the 12k rotated-MNIST benchmark.

Every record has its own angle, drawn from a public seed and its place in the file, never from its content.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.data.base import DataError, Dataset, load, register_dataset
from erlangen.data.preprocessing import Preprocessing
from erlangen.data.store import obtain, roots
from erlangen.streams import Stream

#: pixels run from −1 (background) to 1
BACKGROUND = -1.0


def rotate(x: Tensor, eighths: Tensor) -> Tensor:
    """Images [N, C, H, W] turned counter-clockwise by ``eighths[n]``·45°: bilinear, exact for multiples of 90°.

    What turns in from outside is background.
    """
    if x.shape[2] != x.shape[3]:
        raise ValueError(f"images of {x.shape[2]}×{x.shape[3]} cannot be turned by 90°; give square ones")
    out = torch.empty_like(x)
    for k in range(8):
        chosen = eighths % 8 == k
        if chosen.any():
            half = _turn45(x[chosen]) if k % 2 else x[chosen]
            out[chosen] = torch.rot90(half, k // 2, (2, 3))
    return out


def _turn45(x: Tensor) -> Tensor:
    c = s = math.sqrt(0.5)
    # grid_sample asks where each target pixel comes from: the inverse turn, with the vertical axis pointing down
    inverse = torch.tensor([[c, -s, 0.0], [s, c, 0.0]], dtype=x.dtype).expand(len(x), 2, 3)
    grid = F.affine_grid(inverse, list(x.shape), align_corners=False)
    return F.grid_sample(x - BACKGROUND, grid, mode="bilinear", align_corners=False) + BACKGROUND


def rotated(dataset: Dataset, name: str, seed: int = 0) -> Dataset:
    """The data set with every image, of both parts, turned by a random multiple of 45°."""

    def turn(images: np.ndarray, part: str) -> np.ndarray:
        x = torch.from_numpy(images)
        eighths = torch.randint(0, 8, (len(x),), generator=Stream(f"rotation of {name}, {part}", seed).at(0))
        parts = zip(x.split(10_000), eighths.split(10_000), strict=True)
        return torch.cat([rotate(*piece) for piece in parts]).numpy()

    test = None if dataset.x_test is None else turn(dataset.x_test, "test")
    return dataclasses.replace(dataset, name=name, x_train=turn(dataset.x_train, "train"), x_test=test)


def _rotated(source: str, name: str) -> Callable[[], Dataset]:
    return lambda: rotated(load(source), name)


for _source, _name in (
    ("mnist", "rotated_mnist"),
    ("fashion_mnist", "rotated_fashion_mnist"),
    ("digits", "rotated_digits"),
):
    register_dataset(_name)(_rotated(_source, _name))


TRAIN_12K = "mnist_all_rotation_normalized_float_train_valid.amat"
TEST_12K = "mnist_all_rotation_normalized_float_test.amat"


def read_amat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 1, H, W] in [−1, 1] and labels from lines of H·W pixels in [0, 1] and a label, between blanks.

    The files of this benchmark hold images column by column; they are turned to lie as MNIST's do.
    """
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as whitespace-separated numbers: {error}") from error
    side = math.isqrt(table.shape[1] - 1) if table.shape[1] > 1 else 0
    if side * side != table.shape[1] - 1 or not side:
        raise DataError(f"{path} has {table.shape[1]} columns; expected a square number of pixels and a label")
    pixels, labels = table[:, :-1], table[:, -1]
    if pixels.min() < 0 or pixels.max() > 1 or (labels != labels.round()).any():
        raise DataError(f"{path}: pixels must lie in [0, 1] and the last column must hold integer labels")
    images = pixels.reshape(-1, 1, side, side).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(2.0 * images - 1.0), labels.astype(np.int64)


@register_dataset("mnist_rot_12k")
def mnist_rot_12k() -> Dataset:
    """The 12,000-image rotated-MNIST benchmark (angles are continuous), 50,000 test images."""
    places = [folder for root in roots() for folder in (root / "mnist_rot_12k", root)]
    folder = next((f for f in places if (f / TRAIN_12K).is_file() and (f / TEST_12K).is_file()), None)
    folder = folder or obtain("mnist_rot_12k")
    (x, y), (x_test, y_test) = read_amat(folder / TRAIN_12K), read_amat(folder / TEST_12K)
    prep = Preprocessing(1, *x.shape[2:])
    names = tuple(str(k) for k in range(10))
    return Dataset("mnist_rot_12k", x, y, x_test, y_test, 10, class_names=names, preprocessing=prep)
