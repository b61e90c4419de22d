"""Releases before the first step: the private mean and spread of the pixels.

One unit, added or removed, may move what the noise hides by no more than the release states, and the constants, the
configuration and the price by nothing but that. Units are single records, and patients of several images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from erlangen.audit.flow import TOLERANCE, Probe
from erlangen.audit.sessions import moved
from erlangen.audit.verdict import Finding, failed, passed
from erlangen.data import Dataset
from erlangen.data.preprocessing import Preprocessing
from erlangen.sampling import Units
from erlangen.training.config import TrainConfig
from erlangen.training.normalise import release_normalisation

OTHERS, IMAGES = 7, 3


def hostile_pixels(channels: int) -> Iterator[tuple[str, np.ndarray]]:
    """Images of one unit at every corner of the range of pixels, and outside it."""
    rng = np.random.default_rng(0)
    for word, value in (("black", 0.0), ("white", 1.0), ("far too bright", 1e6), ("negative", -1e6)):
        yield word, np.full((IMAGES, channels, 4, 4), value, dtype=np.float32)
    yield "black and white", rng.integers(0, 2, (IMAGES, channels, 4, 4)).astype(np.float32)


def data_of(last: np.ndarray, channels: int, grouped: bool) -> tuple[Dataset, Dataset]:
    """Neighbours: ordinary units and a hostile one, which the second does not have."""
    prep = Preprocessing(channels, 4, 4)
    rows = OTHERS * IMAGES if grouped else OTHERS
    others = np.random.default_rng(1).random((rows, channels, 4, 4)).astype(np.float32)
    mine = last if grouped else last[:1]

    def dataset(pixels: np.ndarray, owner: np.ndarray) -> Dataset:
        x, y = prep.normalise(pixels), np.arange(len(pixels)) % 2
        return Dataset("audit", x, y, None, None, 2, owner if grouped else None, preprocessing=prep)

    owner = np.repeat(np.arange(OTHERS + 1), IMAGES)
    return dataset(np.concatenate([others, mine]), owner), dataset(others, owner[: -IMAGES or None])


def audit_normalisation(name: str) -> Finding:
    """Sensitivity and information flow of `release_normalisation`."""
    worst, tried = 0.0, 0
    for channels in (1, 3):
        for grouped in (False, True):
            for label, pixels in hostile_pixels(channels):
                problem, found = _attacked(*data_of(pixels, channels, grouped), grouped)
                tried, worst = tried + 1, max(worst, found)
                if problem is None and not found <= 1 + TOLERANCE:
                    problem = f"one unit moves the release by {found:.5g} times what is stated"
                if problem is not None:
                    where = f"{label}, {channels} channel(s), {'patients' if grouped else 'records'}"
                    return failed(name, "prior release", f"{problem} ({where})", tried)
    return passed(name, "prior release", tried, {"sensitivity": worst})


def _attacked(with_unit: Dataset, without: Dataset, grouped: bool) -> tuple[str | None, float]:
    config = TrainConfig(epsilon=None, noise_multiplier=2.0, data_options={"normalise": "private"})
    seen = []
    for data in (with_unit, without):
        probe, units = Probe(), Units(len(data), data.unit, "patient" if grouped else "record")
        _, settled, release = release_normalisation(data, units, config, "audit", probe)
        seen.append((probe.draws, settled, release, units.count))
    (a, settled, release, count), (b, other, same, fewer) = seen
    # the number of units is public, and what the probe answers is divided by it: compare what does not depend on it
    if release != same or count != fewer + 1 or settled.data_options.keys() != other.data_options.keys():
        return "the configuration or the price depends on the unit", math.inf
    problem, distance = moved(a, b)
    return problem, distance * float(getattr(release.event, "noise_multiplier", math.inf))


__all__ = ["audit_normalisation", "data_of", "hostile_pixels"]
