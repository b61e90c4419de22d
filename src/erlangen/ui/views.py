"""What the page shows of runs, as JSON: texts, tables, and figures for plotly. Figures are those of `erlangen.report`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from erlangen.accounting.words import upper
from erlangen.report import charts, interactive, overview
from erlangen.report.chart import Axis, Chart, Heat, Series, floats
from erlangen.report.folder import Run, finite_or_inf
from erlangen.report.privacy import statement
from erlangen.training.folder import without_places
from erlangen.ui.runs import Seen

#: figures of one run, in order; each is None where the run has nothing to show
FINISHED: tuple[Callable[[Run], Chart | Heat | None], ...] = (
    charts.training_curves, charts.spending, charts.attacker, charts.calibration, charts.confusion,
)  # fmt: skip
LIVE = FINISHED[:2]


def detail(seen: Seen) -> dict[str, Any]:
    """One run: its row, its privacy in words, its figures, its options."""
    run = seen.as_run()
    words = None if seen.run is None else asdict(statement(seen.run))
    made = [] if run is None else [make(run) for make in (FINISHED if seen.run is not None else LIVE)]
    options = {} if seen.config is None else without_places(seen.config)
    return {
        **seen.row(),
        "statement": words,
        "evaluations": len(seen.history),
        "figures": [picture(f) for f in made if f is not None],
        "options": [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in options.items()],
    }


def comparison(chosen: Sequence[Seen]) -> dict[str, Any]:
    """Several runs: accuracy against the true ε of finished ones, and the way of each there."""
    finished = [s.run for s in chosen if s.run is not None]
    figures: list[Chart | None] = [progress(chosen)]
    notes = list(dict.fromkeys(run.note for run in finished if run.note))  # what their comparison says about ε
    if len(finished) > 1:
        figures.insert(0, overview.accuracy_against_epsilon(finished))
        notes += [*overview.together(finished), *overview.comparability(finished)]
    notes += [
        f"{s.name} has not finished; it is in the second figure only." for s in chosen if s.run is None and s.config
    ]
    return {
        "rows": [s.row() for s in chosen],
        "notes": notes,
        "figures": [picture(f) for f in figures if f is not None],
    }


def progress(chosen: Sequence[Seen]) -> Chart | None:
    """Accuracy against the ε spent so far, one line for each run, live ones too."""
    series: list[Series] = []
    for seen in chosen:
        rows = [
            r for r in seen.history
            if isinstance(r.get("test_accuracy"), (int, float)) and math.isfinite(finite_or_inf(r.get("epsilon")))
        ]  # fmt: skip
        if rows:
            x, y = floats([r["epsilon"] for r in rows]), floats([r["test_accuracy"] for r in rows])
            series.append(Series(seen.name, x, y, colour=f"c{len(series) % 8}", dash=seen.state == "running"))
    if not series:
        return None
    best = max(series, key=lambda s: s.y[-1])
    return Chart(
        "progress",
        "Accuracy against the ε spent so far",
        "Each line is one run from its first evaluation to its last; dashed lines are still training. Accuracy is that on the "
        "public test set.",
        f"{len(series)} run(s); the highest last accuracy is {best.y[-1]:.1%} at ε = {upper(best.x[-1], 3)} ({best.name}).",
        Axis("ε spent", bound="upper"),
        charts.ACCURACY,
        tuple(series),
    )


def picture(figure: Chart | Heat) -> dict[str, Any]:
    """A figure with its words and its data; texts are plain, plotly's are escaped by `interactive`."""
    head, body = figure.table()
    words = {"key": figure.key, "title": figure.title, "caption": figure.caption, "alt": figure.alt}
    return {**words, "height": figure.height, "plot": interactive.figure(figure), "head": head, "body": body[:400]}
