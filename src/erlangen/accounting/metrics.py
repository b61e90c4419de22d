"""Metrics of a private validation split, released with accounted noise.

Each function returns the noisy value together with the event it costs; record the event (`Ledger.spend`, or
`Accountant.record`) *before* using the value. The validation split is private data: its records are the units, and its
size is treated as public.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .events import gaussian

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class PrivateMetric:
    """A released value, its price and its error."""

    value: Any
    event: DpEvent
    std: float
    """Standard deviation of the noise on `value` (per entry), before rounding and clamping."""
    sensitivity: float
    """L2 sensitivity of the released counts to adding or removing one record."""


def accuracy(
    predicted: npt.ArrayLike,
    actual: npt.ArrayLike,
    noise_multiplier: float,
    rng: np.random.Generator | None = None,
) -> PrivateMetric:
    """Noisy accuracy. One record changes the number of right answers by at most 1: sensitivity 1.

    The noisy count is rounded to a whole number, which removes the low-order bits that floating-point noise leaks
    through, and clamped to [0, n]; both are post-processing.
    """
    import numpy as np

    labels, truth = _labels(predicted, "predicted"), _labels(actual, "actual")
    if len(labels) != len(truth) or len(truth) == 0:
        raise ValueError(f"{len(labels)} predictions for {len(truth)} records; pass one prediction per record")
    event = gaussian(noise_multiplier)
    count = float(np.count_nonzero(labels == truth))
    noisy = float(np.rint(count + noise_multiplier * _normal((), rng)))
    n = len(truth)
    return PrivateMetric(min(max(noisy, 0.0), n) / n, event, noise_multiplier / n, 1.0)


def confusion_matrix(
    predicted: npt.ArrayLike,
    actual: npt.ArrayLike,
    classes: int,
    noise_multiplier: float,
    rng: np.random.Generator | None = None,
) -> PrivateMetric:
    """Noisy counts [actual, predicted]. One record is one count in one cell: L2 sensitivity 1 for all cells together.

    Whole numbers, negative ones included (clamping single cells would bias sums of them; clamp at the end if needed).
    """
    import numpy as np

    labels, truth = _labels(predicted, "predicted"), _labels(actual, "actual")
    if len(labels) != len(truth):
        raise ValueError(f"{len(labels)} predictions for {len(truth)} records; pass one prediction per record")
    if classes < 1:
        raise ValueError(f"classes = {classes} must be at least 1")
    for name, values in (("predicted", labels), ("actual", truth)):
        if len(values) and not (values.min() >= 0 and values.max() < classes):
            raise ValueError(f"{name} labels must lie in 0 … {classes - 1}")
    event = gaussian(noise_multiplier)
    counts = np.bincount(truth * classes + labels, minlength=classes * classes).reshape(classes, classes)
    noisy = np.rint(counts + noise_multiplier * _normal((classes, classes), rng))
    return PrivateMetric(noisy.astype(np.int64), event, noise_multiplier, 1.0)


def _labels(values: npt.ArrayLike, name: str) -> Any:
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be a one-dimensional array of whole numbers, not {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _normal(shape: tuple[int, ...], rng: np.random.Generator | None) -> Any:
    """Standard normals of the given stream, or from the system's secure generator: nobody can draw them again."""
    import numpy as np

    if rng is not None:
        return rng.standard_normal(shape)
    from scipy.special import ndtri

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64) >> np.uint64(12)  # ½ more is exact
    return ndtri((words + 0.5) * 2.0**-52).reshape(shape)
