"""Charts as plotly figures. Colours stay names (``@c0``, ``@ink:0.2``) until the page knows whether it is light or dark.

Plotly reads a little HTML in its texts. Every text that comes from outside is escaped here, in one place.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from erlangen.report.chart import Axis, Chart, Heat, Series, number, short

#: more rows or columns than this, and numbers in cells cannot be read
READABLE_CELLS = 25


def text(value: object) -> str:
    """A user's text for plotly: no markup, no line breaks of its own."""
    return html.escape(" ".join(str(value).split()), quote=False)


def figure(chart: Chart | Heat) -> dict[str, Any]:
    """``{"data": …, "layout": …}`` for ``Plotly.newPlot``."""
    return _chart(chart) if isinstance(chart, Chart) else _heat(chart)


def _chart(chart: Chart) -> dict[str, Any]:
    data = [trace for series in chart.series for trace in _traces(series, chart)]
    layout = _layout(chart.height)
    layout["xaxis"] = _axis(chart.x)
    layout["yaxis"] = _axis(chart.y)
    if chart.right is not None:
        second = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickmode": "auto"}
        layout["yaxis2"] = _axis(chart.right) | second
    layout["showlegend"] = len(chart.series) > 1
    layout["barmode"] = "group"
    return {"data": data, "layout": layout}


def _traces(s: Series, chart: Chart) -> list[dict[str, Any]]:
    axis = chart.right if s.right and chart.right is not None else chart.y
    hover = [_hover(s, chart.x, axis, k) for k in range(len(s.x))]
    common: dict[str, Any] = {
        "name": text(s.name),
        "x": _finite(s.x),
        "y": _finite(s.y),
        "hovertext": hover,
        "hoverinfo": "text",
    }
    if s.right and chart.right is not None:
        common["yaxis"] = "y2"
    if s.kind == "bars":
        width = {} if chart.x.categories is not None else {"width": s.width or 0.8 * _gap(s.x)}
        return [{**common, **width, "type": "bar", "marker": {"color": f"@{s.colour}", "line": {"width": 0}}}]
    line = {"color": f"@{s.colour}", "width": 2.5, "dash": "dash" if s.dash else "solid"}
    scatter = {**common, "type": "scatter", "line": line, "marker": {"color": f"@{s.colour}", "size": 8}}
    if s.kind == "steps":
        return [{**scatter, "mode": "lines", "line": {**line, "shape": "hv", "width": 1.5}, "hoverinfo": "skip"}]
    if s.kind == "points":
        scatter["mode"] = "lines+markers" if s.joined else "markers"
        scatter["marker"] = {"color": f"@{s.colour}", "size": 10, "line": {"color": "@surface", "width": 1.5}}
        scatter["line"] = {**line, "width": 1.5}
        if s.low is not None and s.high is not None:
            up, down = ([abs(e - y) for e, y in zip(ends, s.y)] for ends in (s.high, s.low))
            scatter["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down,
                                  "color": f"@{s.colour}", "thickness": 1.5, "width": 5}  # fmt: skip
        return [scatter]
    dots = 1 < len(s.x) <= 40 and not s.dash
    return [{**scatter, "mode": "lines+markers" if dots else "lines", "marker": {"color": f"@{s.colour}", "size": 6}}]


def _hover(s: Series, x: Axis, y: Axis, k: int) -> str:
    parts = [
        f"<b>{text(s.name)}</b>",
        f"{text(x.label)}: {text(number(s.x[k], x))}",
        f"{text(y.label)}: {text(number(s.y[k], y, s.bound))}",
    ]
    if s.low is not None and s.high is not None:
        parts.append(f"{text(number(s.low[k], y))} to {text(number(s.high[k], y))}")
    if s.notes is not None:
        parts.append(text(s.notes[k]))
    return "<br>".join(parts)


def _heat(chart: Heat) -> dict[str, Any]:
    rows, columns = chart.values.shape
    low, high = chart.span if chart.span is not None else (float(chart.values.min()), float(chart.values.max()))
    _, body = chart.table()
    gap = 1 if chart.square else 0
    hover = [
        [f"{text(chart.y)}: {text(chart.rows[i])}<br>{text(chart.x)}: {text(chart.columns[j])}<br><b>{text(cell)}</b>"
         for j, cell in enumerate(row[1:])]
        for i, row in enumerate(body)
    ]  # fmt: skip
    trace: dict[str, Any] = {
        "type": "heatmap", "z": chart.values.tolist(), "zmin": low, "zmax": high, "xgap": gap, "ygap": 1,
        "hovertext": hover, "hoverinfo": "text", "colorscale": "@diverging" if chart.diverging else "@sequential",
        "colorbar": {"title": {"text": text(chart.scale), "side": "right"}, "thickness": 12, "outlinewidth": 0},
    }  # fmt: skip
    if chart.ticks is not None:
        trace["colorbar"] |= {"tickvals": [v for v, _ in chart.ticks], "ticktext": [text(t) for _, t in chart.ticks]}
    if chart.texts is not None and max(rows, columns) <= READABLE_CELLS:
        trace |= {"text": [[text(c) for c in row] for row in chart.texts], "texttemplate": "%{text}"}
    layout = _layout(chart.height)
    layout["xaxis"] = {**_names(chart.columns, chart.x), "side": "bottom", "showgrid": False}
    layout["yaxis"] = {**_names(chart.rows, chart.y), "autorange": "reversed", "showgrid": False}
    return {"data": [trace], "layout": layout}


def _names(names: Sequence[str], title: str) -> dict[str, Any]:
    """Places 0, 1, … with names: two classes of one name stay two."""
    step = max(1, math.ceil(len(names) / READABLE_CELLS))
    step = 10 if step == 2 and len(names) > 40 else step
    places = list(range(0, len(names), step))
    return {
        "title": {"text": text(title)}, "tickvals": places, "ticktext": [text(short(names[k])) for k in places],
        "automargin": True, "zeroline": False, "ticks": "",
    }  # fmt: skip


def _axis(axis: Axis) -> dict[str, Any]:
    out: dict[str, Any] = {
        "title": {"text": text(axis.label), "standoff": 6}, "automargin": True, "gridcolor": "@grid", "zerolinecolor": "@grid",
        "linecolor": "@grid", "tickcolor": "@grid", "type": "log" if axis.log else "linear",
    }  # fmt: skip
    if axis.categories is not None:
        out |= {"tickvals": list(range(len(axis.categories))), "ticktext": [text(short(c)) for c in axis.categories]}
        out |= {
            "showgrid": False,
            "zeroline": False,
            "range": [-0.6, len(axis.categories) - 0.4],
            "autotickangles": [0, -40, -90],
        }
    if axis.percent:  # of a curve that is flat, ticks would all read 100%, or go on to 200%
        out |= {"tickformat": ".2~%", "minallowed": 0.0, "maxallowed": 1.02}
    if axis.span is not None:
        out["range"] = [math.log10(v) for v in axis.span] if axis.log else list(axis.span)
    return out


def _layout(height: int) -> dict[str, Any]:
    return {
        "height": height, "margin": {"l": 56, "r": 24, "t": 34, "b": 48}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"family": "system-ui, sans-serif", "size": 13, "color": "@ink"},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "hoverlabel": {"bgcolor": "@surface", "bordercolor": "@grid", "font": {"color": "@ink"}, "align": "left"},
        "hovermode": "closest", "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@quiet:0.7", "activecolor": "@accent"},
    }  # fmt: skip


def _finite(values: Sequence[float]) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values]


def _gap(x: Sequence[float]) -> float:
    gaps = sorted(b - a for a, b in zip(sorted(x), sorted(x)[1:]) if b > a)
    return gaps[len(gaps) // 2] if gaps else 1.0
