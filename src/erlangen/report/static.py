"""The same charts on paper: SVG or PDF by matplotlib, drawn from the same values."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from erlangen.report.chart import Axis, Chart, Figure, Gallery, Heat, Picture, Series, short
from erlangen.report.pixels import rgba

FORMATS = ("svg", "pdf")
#: letters that fit below a small image
CAPTION = 18
COLOURS = {
    "c0": "#2f5fd0", "c1": "#c2410c", "c2": "#0f766e", "c3": "#7c3aed", "c4": "#b4256b", "c5": "#57730b", "c6": "#6b7280",
    "c7": "#0e7490", "ink": "#1c1b19", "soft": "#d5dbea", "bad": "#b42318", "good": "#0f766e",
}  # fmt: skip


def save(figures: dict[str, Figure], folder: Path, form: str = "svg") -> list[Path]:
    """One file per figure, ``NAME.svg`` or ``NAME.pdf``; names are made of letters, digits and dashes."""
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}; choose one of {', '.join(FORMATS)}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, chart in figures.items():
        path = folder / f"{name}.{form}"
        draw(chart, path)
        paths.append(path)
    return paths


def draw(chart: Figure, path: Path) -> None:
    """Write one figure. Text stays text in SVG, so that it can be searched and set in the paper's own font."""
    import matplotlib

    style: dict[Any, Any] = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "pdf.fonttype": 42,
        "text.usetex": False, "text.parse_math": False, "savefig.bbox": "tight", "svg.hashsalt": "erlangen",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=_size(chart), layout="constrained")
        if isinstance(chart, Chart):
            _chart(canvas, chart)
        elif isinstance(chart, Heat):
            _heat(canvas, chart)
        else:
            _gallery(canvas, chart)
        metadata = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}
        canvas.savefig(path, format=path.suffix[1:], metadata=metadata)


def text(value: object) -> str:
    """A user's text for matplotlib: one line, not hidden from legends (leading underscore). ``$`` is no mathematics here."""
    plain = " ".join(str(value).split())
    return f" {plain}" if plain.startswith("_") else plain


def _size(chart: Figure) -> tuple[float, float]:
    if isinstance(chart, Gallery):
        columns = chart.columns or 8
        return 0.95 * min(columns, len(chart.pictures)), 1.25 * math.ceil(len(chart.pictures) / columns)
    return (4.4 if chart.square else 6.0), min(9.0, max(2.8, chart.height / 105))


def _chart(canvas: Any, chart: Chart) -> None:
    axes = canvas.add_subplot()
    other = axes.twinx() if chart.right is not None else None
    bars = [s for s in chart.series if s.kind == "bars"]
    for s in chart.series:
        place = other if s.right and other is not None else axes
        _series(place, s, bars)
    _axis(axes.xaxis, axes.set_xlabel, axes.set_xlim, chart.x)
    _axis(axes.yaxis, axes.set_ylabel, axes.set_ylim, chart.y)
    if other is not None and chart.right is not None:
        other.spines["right"].set_visible(True)
        _axis(other.yaxis, other.set_ylabel, other.set_ylim, chart.right)
        other.set_ylim(bottom=0)
    if chart.x.log:
        axes.set_xscale("log")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(chart.series) > 1:
        handles = [h for a in (axes, other) if a is not None for h in a.get_legend_handles_labels()[0]]
        labels = [t for a in (axes, other) if a is not None for t in a.get_legend_handles_labels()[1]]
        canvas.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)


def _series(axes: Any, s: Series, bars: list[Series]) -> None:
    colour, label, x, y = COLOURS[s.colour], text(s.name), np.array(s.x), np.array(s.y)
    dash = "--" if s.dash else "-"
    if s.kind == "bars":
        gap = float(np.median(np.diff(np.sort(x)))) if len(x) > 1 else 1.0
        width = s.width or 0.8 * gap / len(bars)
        axes.bar(x + width * (bars.index(s) - (len(bars) - 1) / 2), y, width, color=colour, label=label)
    elif s.kind == "steps":
        axes.step(x, y, dash, where="post", color=colour, linewidth=1, label=label)
    elif s.kind == "points":
        line = "-" if s.joined else "none"
        errors = (
            None if s.low is None or s.high is None else np.abs(np.array([np.array(s.low) - y, np.array(s.high) - y]))
        )
        axes.errorbar(
            x, y, errors, fmt="o", linestyle=line, color=colour, label=label, capsize=3, linewidth=1, markersize=4
        )
    else:
        axes.plot(
            x, y, dash, color=colour, label=label, marker="o" if 1 < len(x) <= 40 and not s.dash else "", markersize=3
        )


def _axis(axis: Any, set_label: Any, set_span: Any, spec: Axis) -> None:
    set_label(text(spec.label))
    if spec.percent:
        axis.set_major_formatter(_per_cent())
        if spec.span is None:  # a curve near 100 % would get room for 106 %
            low, high = axis.get_view_interval()
            set_span(max(low, -0.02), min(high, 1.02))
    if spec.categories is not None:
        long = max(map(len, spec.categories)) * len(spec.categories) > 60
        axis.set_ticks(range(len(spec.categories)), [text(short(c, 24)) for c in spec.categories])
        axis.set_tick_params(rotation=60 if long else 0)
    if spec.span is not None:
        set_span(*spec.span)


def _per_cent() -> Any:
    """Ticks with as many decimals as their steps need: 95.5, 96.0, 96.5 and not three times 96. Shares above 100 % have none."""
    from matplotlib.ticker import PercentFormatter

    class Exact(PercentFormatter):
        def set_locs(self, locs: Any) -> None:
            super().set_locs(locs)
            enough = (d for d in range(5) if all(abs(round(100 * x, d) - 100 * x) < 1e-6 for x in locs))
            self.decimals = next(enough, 5)

        def __call__(self, x: float, pos: Any = None) -> str:
            return "" if x > 1 + 1e-9 else super().__call__(x, pos)

    return Exact(1.0, decimals=0)


def _heat(canvas: Any, chart: Heat) -> None:
    axes = canvas.add_subplot()
    low, high = chart.span if chart.span is not None else (float(chart.values.min()), float(chart.values.max()))
    scheme = "RdBu_r" if chart.diverging else "Blues"
    image = axes.imshow(chart.values, cmap=scheme, vmin=low, vmax=high, aspect="equal" if chart.square else "auto")
    for names, put in ((chart.columns, axes.set_xticks), (chart.rows, axes.set_yticks)):
        step = max(1, math.ceil(len(names) / 40)) if len(names) != 41 else 10
        put(range(0, len(names), step), [text(short(n, 24)) for n in names[::step]])
    if max(map(len, chart.columns)) > 3 and len(chart.columns) > 6:
        axes.tick_params(axis="x", rotation=60)
    axes.set_xlabel(text(chart.x))
    axes.set_ylabel(text(chart.y))
    bar = canvas.colorbar(image, ax=axes, shrink=0.8, label=text(chart.scale))
    if chart.ticks is not None:
        bar.set_ticks([v for v, _ in chart.ticks], labels=[text(t) for _, t in chart.ticks])
    if chart.texts is not None and max(chart.values.shape) <= 25:
        middle = (low + high) / 2
        for i, row in enumerate(chart.texts):
            for j, cell in enumerate(row):
                shade = "white" if not chart.diverging and chart.values[i, j] > middle else "black"
                axes.text(j, i, text(cell), ha="center", va="center", fontsize=7, color=shade)


def _gallery(canvas: Any, chart: Gallery) -> None:
    columns = min(chart.columns or 8, len(chart.pictures))
    rows = math.ceil(len(chart.pictures) / columns)
    for k, axes in enumerate(canvas.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if k < len(chart.pictures):
            picture = chart.pictures[k]
            axes.imshow(rgba(picture.pixels, picture.signed), interpolation="nearest")
            colour = COLOURS[picture.mark] if picture.mark else "#1c1b19"
            axes.set_title("\n".join(_lines(picture)), fontsize=5.5, color=colour)


def _lines(picture: Picture) -> list[str]:
    """Two lines at most, as wide as a picture; of a word that is wider, its beginning and its end."""
    label, second = text(picture.label), text(picture.second)
    lines = [label, second] if second else textwrap.wrap(label, CAPTION)
    return [short(line, CAPTION) for line in (lines if len(lines) <= 2 else [label])]
