"""Charts as data: what is shown, without saying by which library. Drawn on the page and on paper from the same values.

Colours are names: ``c0`` … ``c7`` (series), ``ink``, ``soft``, ``bad``, ``good``; each renderer has its own palette.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from erlangen.accounting.words import lower, upper, upper_share

Row: TypeAlias = list[str]
#: values that are bounds (an ε, the hits of any attack) are written rounded away from what would promise too much
Bound: TypeAlias = Literal["", "upper", "lower"]


@dataclass(frozen=True)
class Axis:
    """``span`` fixes the range, ``percent`` writes shares as percentages, ``categories`` names places 0, 1, …"""

    label: str
    span: tuple[float, float] | None = None
    log: bool = False
    percent: bool = False
    categories: tuple[str, ...] | None = None
    bound: Bound = ""


@dataclass(frozen=True)
class Series:
    """One line (or steps), set of points, or bars. ``low``/``high`` are the ends of error bars.

    Points are ``joined`` by a line where their order means something; ``width`` is that of bars on a number line. Its values are
    bounds of the kind ``bound`` where that of the axis does not fit.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["line", "points", "bars", "steps"] = "line"
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    colour: str = "c0"
    dash: bool = False
    right: bool = False
    joined: bool = False
    width: float | None = None
    notes: tuple[str, ...] | None = None
    bound: Bound = ""


@dataclass(frozen=True)
class Base:
    """``key`` names files and anchors; ``caption`` says how to read it; ``alt`` says what is to be seen, with numbers."""

    key: str
    title: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Chart(Base):
    """Series over two or three axes."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    right: Axis | None = None
    height: int = 380
    square: bool = False

    def table(self) -> tuple[Row, list[Row]]:
        header = ["series", self.x.label, "value", "low", "high"]
        rows = []
        for s in self.series:
            axis = self.right if s.right and self.right is not None else self.y
            for k, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
                ends = [number(e[k], axis) if e is not None else "" for e in (s.low, s.high)]
                rows.append([s.name, number(x, self.x), number(y, axis, s.bound), *ends])
        return header, rows


@dataclass(frozen=True)
class Heat(Base):
    """A matrix with named rows and columns. ``diverging`` scales are symmetric about ``centre``."""

    values: np.ndarray
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    x: str
    y: str
    scale: str
    diverging: bool = False
    span: tuple[float, float] | None = None
    texts: tuple[tuple[str, ...], ...] | None = None
    ticks: tuple[tuple[float, str], ...] | None = None
    height: int = 420
    square: bool = False

    def table(self) -> tuple[Row, list[Row]]:
        body = self.texts or tuple(tuple(plain(v) for v in row) for row in self.values)
        return ["", *self.columns], [[name, *row] for name, row in zip(self.rows, body, strict=True)]


@dataclass(frozen=True)
class Picture:
    """One small image [H, W] or [H, W, 3] in [0, 1] (or, ``signed``, [−1, 1]) with a line of text below, or two."""

    pixels: np.ndarray
    label: str
    alt: str
    signed: bool = False
    mark: Literal["", "good", "bad"] = ""
    second: str = ""


@dataclass(frozen=True)
class Gallery(Base):
    """Small images in reading order, ``columns`` to a row (0: as many as fit)."""

    pictures: tuple[Picture, ...]
    columns: int = 0

    def table(self) -> tuple[Row, list[Row]]:
        return ["image", "what it shows"], [[", ".join(filter(None, (p.label, p.second))), p.alt] for p in self.pictures]


Figure: TypeAlias = Chart | Heat | Gallery


def number(value: float, axis: Axis, bound: Bound = "") -> str:
    bound = bound or axis.bound
    if axis.categories is not None and float(value).is_integer() and 0 <= value < len(axis.categories):
        return axis.categories[int(value)]
    if axis.percent:
        return upper_share(value) if bound == "upper" else f"{100 * value:.1f} %"
    if not bound or not math.isfinite(value):
        return plain(value)
    return upper(value, 4) if bound == "upper" else lower(value, 4)


def plain(value: float) -> str:
    """Four digits."""
    value = float(value)
    if not math.isfinite(value):
        return "∞" if value > 0 else "–∞" if value < 0 else "–"
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def small(value: float) -> str:
    """A small number such as δ, rounded up: 10⁻⁵, 7.0·10⁻⁶."""
    if not 0 < value < 0.01:
        return upper(value, 4) if 0 < value < math.inf else plain(value)
    mantissa, exponent = upper(value, 2, "e").split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1.0" else f"{mantissa}·{power}"


def short(name: str, most: int = 34) -> str:
    """The beginning and the end of a long name: both tell layers and classes apart."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2) + 1 :]}"


def floats(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
