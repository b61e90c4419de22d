"""Mean and spread of the pixels, released privately: one Gaussian release before the first step.

Each unit u (a record, or a patient with all their images) contributes v_u = (mean, mean of squares) of its pixels per
channel, averaged over its images: 2C numbers in [0, 1]. Σ_u (v_u − ½) changes by at most Δ = ½√(2C) when a unit is added
or removed. What is released is ½ + (Σ_u (v_u − ½) + N(0, σ²Δ²))/n; everything after that is post-processing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from erlangen.accounting import gaussian, noise_multiplier
from erlangen.accounting.ledger import Release
from erlangen.data import DataError, Dataset
from erlangen.data.base import renormalised
from erlangen.data.options import DataOptions
from erlangen.mechanisms import NoiseSource, SecureNoise, StreamNoise
from erlangen.sampling import Units
from erlangen.training.config import TrainConfig

#: the share of ε that the release may cost by itself where σ is left open; composed with training it costs far less
SHARE = 0.1
#: an estimate of the spread below this says more about the noise than about the pixels
LEAST_STD = 0.02


def wants_private(config: TrainConfig) -> bool:
    return config.data_options.get("normalise") == "private"


def unit_statistics(dataset: Dataset, units: Units) -> np.ndarray:
    """[units, 2C]: mean and mean of squares of each unit's pixels per channel, in [0, 1]."""
    prep = dataset.preprocessing
    if prep is None or prep.kind != "image":
        raise DataError(
            "normalise=private needs pixels whose range is known (uint8, uint16, images): floats have none, so their mean "
            "has no bounded sensitivity. Save integers, or give public constants: normalise=MEAN/STD"
        )
    rows = []
    for part in np.array_split(dataset.x_train, max(1, len(dataset) // 1024)):
        pixels = np.clip(prep.denormalise(part), 0.0, 1.0).astype(np.float64)
        rows.append(np.concatenate([pixels.mean((2, 3)), np.square(pixels).mean((2, 3))], axis=1))
    of_rows = np.concatenate(rows)
    if not units.grouped:
        return of_rows
    return np.stack([of_rows[index.numpy()].mean(0) for index in units.rows_of(torch.arange(units.count))])


def sensitivity(channels: int) -> float:
    return 0.5 * math.sqrt(2 * channels)


def release_normalisation(
    dataset: Dataset, units: Units, config: TrainConfig, run_id: str, noise: NoiseSource | None = None
) -> tuple[Dataset, TrainConfig, Release]:
    """The data set under released constants, the configuration that holds them, and what has to be written down first.

    The constants may leave the process only after the release is in the ledger. ``noise`` stands in for the run's own, for audits.
    """
    values = unit_statistics(dataset, units)
    channels, delta = values.shape[1] // 2, sensitivity(values.shape[1] // 2)
    sigma = _sigma(config)
    if noise is None:
        noise = SecureNoise() if config.secure else StreamNoise(config.seed, run_id, purpose="normalisation")
    noise.next_release()
    total = torch.from_numpy((values - 0.5).sum(0))
    released = (0.5 + noise.perturb(total, sigma * delta) / units.count).clamp(0.0, 1.0)
    mean, square = released[:channels], released[channels:]
    std = (square - mean.square()).clamp(min=LEAST_STD**2).sqrt()
    constants = tuple(round(float(v), 4) for v in mean), tuple(round(float(v), 4) for v in std)
    text = "/".join(",".join(map(str, part)) for part in constants)
    options: dict[str, Any] = {k: v for k, v in config.data_options.items() if k != "normalise_sigma"}
    settled = dataclasses.replace(config, data_options={**options, "normalise": text})
    release = Release(
        gaussian(sigma), sensitivity=delta, sigma_eff=sigma, unit=units.name, mechanism="pixel-mean-and-spread",
        reason="no noise is added (σ = 0)" if sigma == 0 else None,
    )  # fmt: skip
    return renormalised(dataset, *constants), settled, release


def _sigma(config: TrainConfig) -> float:
    given = DataOptions.of(config.data_options).normalise_sigma
    if given is not None:
        return float(given)
    if config.epsilon is None:
        assert config.noise_multiplier is not None
        return 10.0 * config.noise_multiplier
    assert config.delta is not None
    return noise_multiplier(SHARE * config.epsilon, config.delta, 1.0, 1)
