"""Any map-style torch data set, read into memory once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from erlangen.data.arrays import from_arrays
from erlangen.data.base import Dataset
from erlangen.data.images import named
from erlangen.data.options import DataOptions
from erlangen.data.preprocessing import DataError
from erlangen.sampling.records import refuse_repeats
from erlangen.sampling.units import unit_labels


def from_torch(
    train: Any, test: Any = None, *, unit: Any = None, name: str = "own", class_names: tuple[str, ...] | None = None,
    **options: Any,
) -> Dataset:  # fmt: skip
    """A `Dataset` from ``train[i] → (image, label)`` (or a mapping with image and label), and a *public* ``test``.

    An image is a tensor, an array, or a Pillow image. Tensors and float arrays are [C, H, W] (or [H, W]) and are used as
    they are; bytes are scaled. ``unit`` is a sequence with one id per record, an attribute of ``train``, or a key of its
    samples; a ``test`` that has that attribute or key, too, must hold nobody of ``train``. A data set with random transforms is
    read once: use ``augment=`` of the training for augmentation. It must not compute anything over other records (a mean, say):
    nobody would account for that.
    """
    labels = unit_labels(train, unit)
    refuse_repeats(train, labels)
    x_train, y_train = _stacked(train, "train")
    arrays = {"x_train": x_train, "y_train": y_train}
    if test is not None:
        arrays["x_test"], arrays["y_test"] = _stacked(test, "test")
    names = class_names if class_names is not None else getattr(train, "classes", None)
    if names is not None and all(isinstance(n, str) for n in names):
        arrays["class_names"] = np.array(list(names), dtype=np.str_)
    if labels is not None:
        arrays["unit"] = np.asarray(labels)
    if test is not None and isinstance(unit, str):
        with suppress(ValueError):  # public images need no owner
            arrays["unit_test"] = np.asarray(unit_labels(test, unit))
    return from_arrays(name, arrays, None if labels is None else "unit", DataOptions.of(options))


def _stacked(dataset: Any, part: str) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"the {part} data is a {type(dataset).__name__}, which has no records by number: Poisson sampling needs a "
            "map-style data set with len() and []"
        )
    if not len(dataset):
        raise DataError(f"the {part} data is empty; there is nothing to train on")
    pairs = [_pair(dataset[i], i, part) for i in range(len(dataset))]
    shapes = {image.shape for image, _ in pairs}
    if len(shapes) > 1:
        common = max(shapes, key=lambda s: sum(image.shape == s for image, _ in pairs))
        odd = [f"record {i} {image.shape}" for i, (image, _) in enumerate(pairs) if image.shape != common]
        raise DataError(
            f"the {part} images have {len(shapes)} shapes; resize them in the data set's transform: {named(odd)}, "
            f"the others {common}"
        )
    return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs], dtype=np.int64)


def _pair(sample: Any, index: int, part: str) -> tuple[np.ndarray, int]:
    if isinstance(sample, Mapping):
        image, label = sample.get("image", sample.get("x")), sample.get("label", sample.get("y"))
    elif isinstance(sample, (tuple, list)) and len(sample) >= 2:
        image, label = sample[0], sample[1]
    else:
        image = label = None
    if image is None or label is None:
        raise DataError(
            f"record {index} of the {part} data is a {type(sample).__name__}; expected (image, label), or a mapping with "
            "image and label"
        )
    value = label.item() if isinstance(label, (Tensor, np.ndarray, np.generic)) else label
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"record {index} of the {part} data has the label {label!r}; labels must be integers ≥ 0")
    array = image.detach().cpu().to(_dtype(image)).numpy() if isinstance(image, Tensor) else np.asarray(image)
    return (array.transpose(2, 0, 1) if _is_picture(image, array) else array), value


def _dtype(image: Tensor) -> torch.dtype:
    """numpy has no bfloat16."""
    return torch.float32 if image.is_floating_point() else image.dtype


def _is_picture(image: Any, array: np.ndarray) -> bool:
    """Pillow images are H×W×C."""
    return array.ndim == 3 and not isinstance(image, (Tensor, np.ndarray))
