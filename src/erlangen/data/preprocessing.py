"""How pixels become a network's input: kept with the run, so that prediction does what training did.

A pixel is first a number in [0, 1], by the range of its *format* (8 or 16 bits, or a white point that was given), then
(pixel − mean)/std. All of it is public: constants, or values that were released privately.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np


class DataError(ValueError):
    """The data cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Preprocessing:
    """``kind`` is "image" (pixels have a range) or "array" (numbers were used as they were given)."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    kind: str = "image"
    #: larger and smaller images are scaled to cover height × width, and the middle is taken
    resize: bool = False
    #: the value of a 16-bit pixel that counts as 1; None is the format's own largest
    white: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) not in (1, self.channels) or not all(math.isfinite(v) for v in values):
                raise DataError(f"{name} is {values}; give one number, or one for each of {self.channels} channel(s)")
        if min(self.std) <= 0:
            raise DataError(f"std is {self.std}; every entry must be above 0")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.height, self.width)

    def normalise(self, pixels: np.ndarray) -> np.ndarray:
        """[..., C, H, W] in [0, 1] → what the network sees, in place where the array is float32."""
        x = np.ascontiguousarray(pixels, dtype=np.float32)
        x -= _per_channel(self.mean)
        x /= _per_channel(self.std)
        return x

    def denormalise(self, x: np.ndarray) -> np.ndarray:
        """The inverse, in a new array."""
        return x * _per_channel(self.std) + _per_channel(self.mean)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Preprocessing:
        known = {f.name for f in dataclasses.fields(cls)}
        if set(values) - known:
            raise DataError(f"unknown fields {sorted(set(values) - known)} in a description of the input")
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})


def _per_channel(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, 1, 1)
