"""A first look at a preset needs no download: data that is not at hand, or is large, has a stand-in of random images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from erlangen.data import Dataset
from erlangen.data.base import replaced_datasets
from erlangen.data.preprocessing import Preprocessing
from erlangen.data.store import PUBLISHED, locate
from erlangen.experiments.presets import SHAPES

#: decoding and holding all of these takes minutes and gigabytes, wherever they are
LARGE = ("tiny_imagenet_200", "imagenette")
#: records of a stand-in, and its largest side: the work of a step grows with the pixels
RECORDS, SIDE = 2000, 32


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Inside, every data set of the papers can be loaded at once; the list names those that were made up.

    What measurements have cached meanwhile is forgotten at the end: a result must never come from a stand-in.
    """
    used: list[str] = []
    with replaced_datasets({name: _maker(name, used) for name in PUBLISHED if _needs(name)}):
        try:
            yield used
        finally:
            if used:
                _forget()


def _needs(name: str) -> bool:
    return name in SHAPES and (name in LARGE or locate(name) is None)


def _maker(name: str, used: list[str]) -> Callable[[], Dataset]:
    def make() -> Dataset:
        if name not in used:
            used.append(name)
        return stand_in(name)

    return make


def stand_in(name: str) -> Dataset:
    """Random images, of at most 32×32 pixels, and the classes of a published data set; its name says what it is."""
    (channels, height, width), classes = SHAPES[name]
    shape = (channels, min(height, SIDE), min(width, SIDE))
    rng = np.random.default_rng(0)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.uniform(-1, 1, (count, *shape)).astype(np.float32), np.arange(count) % classes

    (x, y), (x_test, y_test) = part(RECORDS), part(max(classes, 100))
    prep = Preprocessing(*shape)
    return Dataset(f"random stand-in for {name}", x, y, x_test, y_test, classes, preprocessing=prep)


def said(used: list[str]) -> str:
    """What a reader must know about the data of a quick run."""
    if not used:
        return ""
    names = ", ".join(sorted(used))
    cure = "; ".join(f"erlangen data get {name}" for name in sorted(used))
    return f"RANDOM IMAGES stand in for {names} (not on this machine, or too large for a first look; to have it: {cure})"


def _forget() -> None:
    for name in ("erlangen.experiments.releases", "erlangen.experiments.clipless"):
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
