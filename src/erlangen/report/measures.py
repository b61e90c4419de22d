"""Numbers of a report from predictions on the public test set: calibration, confusion, certified accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Per bin of confidence: mean confidence, accuracy, number of images. Empty bins are left out."""

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray

    @property
    def ece(self) -> float:
        """Σ_b (n_b/n)·|accuracy_b − confidence_b|"""
        return float((self.count * np.abs(self.accuracy - self.confidence)).sum() / max(1, self.count.sum()))


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    """Equal-width bins of the confidence max_k p_k, as ``training.metrics`` has them."""
    confidence = probabilities.max(1)
    right = (probabilities.argmax(1) == labels).astype(float)
    index = np.minimum((confidence.astype(np.float32) * np.float32(bins)).astype(int), bins - 1)
    count = np.bincount(index, minlength=bins)
    kept = count > 0
    mean = [np.bincount(index, values, bins)[kept] / count[kept] for values in (confidence, right)]
    return Reliability(mean[0], mean[1], count[kept])


def brier(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean over classes and samples of (p − one-hot)²."""
    target = np.eye(probabilities.shape[1])[labels]
    return float(np.square(probabilities - target).mean())


def confusion(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[actual, predicted] counts."""
    classes = probabilities.shape[1]
    return np.bincount(labels * classes + probabilities.argmax(1), minlength=classes**2).reshape(classes, classes)


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson)."""
    if total == 0:
        return 0.0, 1.0
    p, z = right / total, 1.959964
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * np.sqrt(p * (1 - p) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    return float(centre - half), float(centre + half)


def certified_accuracy(radius: np.ndarray, right: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """For each r of the grid: the share of images that are right and stay right under every change of L2 norm ≤ r."""
    return ((radius[None] >= grid[:, None]) & right[None]).mean(1)


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Places of the points (ε, accuracy) that no other point beats: less ε and no less accuracy. Sorted by ε."""
    front, best = [], -np.inf
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            front.append(place)
            best = points[place][1]
    return front
