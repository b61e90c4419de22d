"""What a user can say about their own data, checked before anything is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erlangen.data.preprocessing import DataError
from erlangen.spelling import hint

#: options that only make sense for files of the user's own
OF_FILES = ("image_size", "channels", "skip_bad", "white", "unit_pattern", "unit_csv")


@dataclass(frozen=True)
class DataOptions:
    """``normalise`` is None (0.5/0.5 for pixels, floats as they are), "half", "none", "private", or "MEAN/STD"."""

    image_size: int | Sequence[int] | None = None
    channels: str = "auto"
    skip_bad: bool = False
    normalise: str | None = None
    #: σ of the private release of mean and variance; None spends a tenth of ε
    normalise_sigma: float | None = None
    white: float | None = None
    unit_pattern: str | None = None
    unit_csv: str | None = None

    def __post_init__(self) -> None:
        size = self.size
        if size is not None and (min(size) < 1 or max(size) > 4096):
            raise DataError(f"image_size is {self.image_size}; give pixels between 1 and 4096")
        if self.channels not in ("auto", "grey", "rgb"):
            raise DataError(f"channels is {self.channels!r}; choose auto, grey or rgb")
        if self.white is not None and not 0 < self.white < float("inf"):
            raise DataError(f"white is {self.white}; give the pixel value (> 0) that counts as white, e.g. 4095")
        if self.normalise_sigma is not None and not self.normalise_sigma >= 0:
            raise DataError(f"normalise_sigma is {self.normalise_sigma}; give σ ≥ 0")
        if self.unit_pattern is not None and self.unit_csv is not None:
            raise DataError("unit_pattern and unit_csv exclude each other: give the one that names each image's owner")
        if self.unit_pattern is not None:
            self._check_pattern(self.unit_pattern)
        if self.unit_csv is not None and not Path(self.unit_csv).is_file():
            raise DataError(f"no file at {self.unit_csv}; unit_csv is a table with a column of file names")
        if self.normalise not in (None, "half", "none", "private"):
            self.constants()

    @staticmethod
    def _check_pattern(pattern: str) -> None:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise DataError(f"unit_pattern {pattern!r} is no regular expression: {error}") from error
        if compiled.groups < 1:
            raise DataError(f"unit_pattern {pattern!r} has no group; put the id in brackets, e.g. '^(p[0-9]+)_'")

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) to resize to."""
        if self.image_size is None:
            return None
        if isinstance(self.image_size, int) and not isinstance(self.image_size, bool):
            return (self.image_size, self.image_size)
        values = tuple(self.image_size) if isinstance(self.image_size, (list, tuple)) else ()
        if len(values) != 2 or not all(isinstance(v, int) for v in values):
            raise DataError(f"image_size is {self.image_size!r}; give one whole number, or height and width")
        return (values[0], values[1])

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) where they were given or are fixed; None where the kind of data or a release decides."""
        fixed = {"half": ((0.5,), (0.5,)), "none": ((0.0,), (1.0,))}
        if self.normalise is None or self.normalise == "private":
            return None
        if self.normalise in fixed:
            return fixed[self.normalise]
        try:
            mean, std = (tuple(float(v) for v in part.split(",")) for part in self.normalise.split("/"))
        except ValueError:
            raise DataError(
                f"normalise is {self.normalise!r}; give half, none, private, or MEAN/STD such as 0.5/0.25 or "
                "0.49,0.48,0.45/0.25,0.24,0.26"
            ) from None
        if min(std) <= 0:
            raise DataError(f"normalise is {self.normalise!r}; the part after '/' is the std and must be above 0")
        return mean, std

    @classmethod
    def of(cls, values: dict[str, Any]) -> DataOptions:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            meant = "".join(hint(name, known) for name in unknown)
            raise DataError(f"unknown data option(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}.{meant}")
        return cls(**values)

    def refuse_for_named(self, name: str) -> None:
        """Published data sets come in one format."""
        default = DataOptions()
        given = [key for key in OF_FILES if getattr(self, key) != getattr(default, key)]
        if given:
            raise DataError(f"data set {name!r} comes in one format: {', '.join(given)} only applies to your own files")
