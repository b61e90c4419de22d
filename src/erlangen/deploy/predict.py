"""Predictions of a trained model for image files, folders of them, and arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from erlangen.data.arrays import read_npz, scaled
from erlangen.data.images import SUFFIXES, BadImage, files_under, read
from erlangen.data.preprocessing import DataError, Preprocessing
from erlangen.deploy.averaged import rows_at_once
from erlangen.deploy.card import ModelCard
from erlangen.lipschitz.radius import certified_radius, is_certifiable
from erlangen.training.device import pick_device

#: arrays of an .npz file that hold images, in the order of preference
ARRAYS = ("x", "images", "x_test", "x_train")


@dataclass(frozen=True)
class Prediction:
    """One input's answer. ``radius``: no change of its pixels (in [0, 1]) of smaller L2 norm changes the class."""

    input: str
    label: str
    index: int
    probability: float
    probabilities: tuple[float, ...]
    radius: float | None = None


@dataclass(frozen=True)
class Predictions:
    """All answers, the names of the classes, what could not be read, and files in folders that are no images."""

    labels: tuple[str, ...]
    rows: tuple[Prediction, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    aside: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            named = {"input": row.input, "class": row.label, "index": row.index, "probability": row.probability}
            named["probabilities"] = dict(zip(self.labels, row.probabilities, strict=True))
            rows.append(named if row.radius is None else {**named, "radius": row.radius})
        return {"predictions": rows, "skipped": [{"input": name, "reason": why} for name, why in self.skipped]}

    def table(self) -> Iterator[list[str]]:
        """A header and one line for each input, for a CSV file."""
        certified = any(row.radius is not None for row in self.rows)
        yield ["input", "class", "probability", *(["radius"] if certified else []), *(f"p({n})" for n in self.labels)]
        for row in self.rows:
            radius = [] if not certified else [f"{row.radius:.6g}"]
            yield [row.input, row.label, f"{row.probability:.6f}", *radius, *(f"{p:.6f}" for p in row.probabilities)]


def predict(
    model: nn.Module, card: ModelCard, inputs: Sequence[str | Path], *, resize: bool = False, skip_bad: bool = False,
    key: str | None = None, batch: int = 256, device: str = "cpu", told: Callable[[int], None] | None = None,
) -> Predictions:  # fmt: skip
    """Answers for every image of ``inputs``: files, folders (searched through), ``.npz`` and ``.npy`` arrays.

    A file that cannot be read is an error that names it, or listed in ``skipped``. ``told`` hears how many answers there are.
    """
    device = pick_device(device)
    reader = _Reader(card, resize, key)
    model = model.to(device).eval()
    pixel = _pixel_size(card.preprocessing)
    certify = is_certifiable(model)
    rows: list[Prediction] = []
    names: list[str] = []
    waiting: list[np.ndarray] = []

    def answer() -> None:
        if names:
            rows.extend(_answers(model, card, names, np.stack(waiting), device, certify, pixel))
            names.clear()
            waiting.clear()
            if told is not None:
                told(len(rows))

    for name, x in reader.all(inputs):
        if isinstance(x, str):
            reader.bad.append((name, x))
            continue
        names.append(name)
        waiting.append(x)
        if len(names) == rows_at_once(model, batch):
            answer()
    answer()
    if reader.bad and not skip_bad:
        shown = "\n".join(f"  {name}: {why}" for name, why in reader.bad[:5])
        more = f"\n  and {len(reader.bad) - 5} more" if len(reader.bad) > 5 else ""
        raise DataError(f"{len(reader.bad)} input(s) cannot be used; --skip-bad leaves them out:\n{shown}{more}")
    if not rows:
        raise DataError("there is no image to predict; give image files, folders, .npz or .npy files")
    return Predictions(card.labels, tuple(rows), tuple(reader.bad), tuple(reader.aside))


@torch.no_grad()
def _answers(
    model: nn.Module, card: ModelCard, names: list[str], x: np.ndarray, device: str, certify: bool, pixel: float
) -> list[Prediction]:
    logits: Tensor = model(torch.from_numpy(x).to(device)).float().cpu()
    p = logits.double().softmax(1)
    radii = (certified_radius(model, logits) * pixel).tolist() if certify else [None] * len(x)
    rows = []
    for name, row, radius in zip(names, p.tolist(), radii, strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        rows.append(Prediction(name, card.labels[best], best, row[best], tuple(row), radius))
    return rows


def _pixel_size(prep: Preprocessing | None) -> float:
    """A change of the pixels by r changes the network's input by at most r/min(std)."""
    return 1.0 if prep is None else min(prep.std)


class _Reader:
    """Network inputs one by one; a string in place of an array is the reason why there is none."""

    def __init__(self, card: ModelCard, resize: bool, key: str | None) -> None:
        self.card, self.key = card, key
        prep = card.preprocessing
        self.prep = dataclasses.replace(prep, resize=True) if prep is not None and resize else prep
        self.bad: list[tuple[str, str]] = []
        self.aside: list[str] = []

    def all(self, inputs: Sequence[str | Path]) -> Iterator[tuple[str, np.ndarray | str]]:
        for source in map(Path, inputs):
            if source.is_dir():
                images, others = files_under(source)
                self.aside += map(str, others)
                if not images:
                    yield str(source), f"holds no images ({', '.join(SUFFIXES)})"
                for path in images:
                    yield str(path), self.image(path)
            elif source.suffix in (".npz", ".npy") and source.is_file():
                yield from self.array(source)
            elif source.is_file():
                yield str(source), self.image(source)
            else:
                yield str(source), "does not exist"

    def image(self, path: Path) -> np.ndarray | str:
        if self.prep is None or self.prep.kind != "image":
            return "is an image, but the model was trained on arrays of numbers with no known range: give .npz or .npy"
        try:
            return self.prep.normalise(read(path, self.prep)[0])
        except BadImage as error:
            hint = "; --resize scales it" if "pixels, not" in str(error) else ""
            return f"{error}{hint}"
        except OSError as error:
            return f"cannot be opened: {error.strerror or error}"

    def array(self, path: Path) -> Iterator[tuple[str, np.ndarray | str]]:
        try:
            x = self._normalised(path, self._array(path))
        except DataError as error:
            yield str(path), str(error)
            return
        for k, row in enumerate(x):
            yield f"{path}[{k}]", row if np.isfinite(row).all() else "holds values that are not finite"

    def _array(self, path: Path) -> np.ndarray:
        if path.suffix == ".npy":
            try:
                return np.load(path, allow_pickle=False)
            except Exception as error:
                raise DataError(f"cannot be read as .npy: {error}") from error
        arrays = read_npz(path)
        wanted = (self.key,) if self.key is not None else ARRAYS
        found = next((arrays[name] for name in wanted if name in arrays), None)
        if found is None and self.key is None and len(arrays) == 1:
            found = next(iter(arrays.values()))
        if found is None:
            raise DataError(f"has the arrays {sorted(arrays)} and none called {' or '.join(wanted)}; name one with --key")
        return found

    def _normalised(self, path: Path, x: np.ndarray) -> np.ndarray:
        channels, height, width = self.card.input_shape
        if x.ndim == 2 or x.shape == (height, width, channels) or x.shape == self.card.input_shape:
            x = x[None]  # one image
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[1:] == (height, width, channels):
            x = x.transpose(0, 3, 1, 2)
        if x.ndim != 4 or x.shape[1:] != self.card.input_shape:
            raise DataError(f"has images of shape {x.shape[1:]}; the model takes {self.card.input_shape}")
        if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
            raise DataError(f"holds {x.dtype}; pixels are numbers")
        prep = self.prep
        pixels, kind = scaled(path.name, "its array", x, None if prep is None else prep.white)
        if prep is None:
            return pixels
        if kind != prep.kind:
            cure = "save uint8 pixels" if prep.kind == "image" else "save floats, scaled as the training data was"
            raise DataError(f"holds {x.dtype}, but the model was trained on {prep.kind} data: {cure}")
        return prep.normalise(pixels)
