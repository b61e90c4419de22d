"""The figures and the table of several runs together: accuracy against the true ε, with spread over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from erlangen.accounting.words import upper
from erlangen.report.chart import Axis, Chart, Series, floats, small
from erlangen.report.folder import Run
from erlangen.report.measures import pareto

#: options that make another method or another task; the rest (ε, noise, rates, steps) is where a method is run
METHOD = (
    "data", "unit", "model", "model_options", "mechanism", "mechanism_options", "clipping", "clipping_options", "views",
    "augment", "average_views", "denoise",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Runs that differ by their seed alone."""

    method: str
    epsilon: float
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def method_names(runs: list[Run]) -> dict[int, str]:
    """For each run (by place) the options in which the runs differ as methods; the mechanism if in none."""
    options = [run.options for run in runs]
    for o in options:
        o["mechanism_options"].pop("loss", None)  # a setting of Clipless that is tuned, as rates are
    differing = [key for key in METHOD if len({json.dumps(o[key], sort_keys=True) for o in options}) > 1]
    return {
        k: " · ".join(word for key in differing or ["mechanism"] if (word := _words(o[key])))
        for k, o in enumerate(options)
    }


def points(runs: list[Run]) -> list[Point]:
    names = method_names(runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for place, run in enumerate(runs):
        if run.accuracy is not None:
            groups.setdefault((names[place], run.setting), []).append(run)
    return [
        Point(name, max(r.epsilon for r in found), tuple(float(r.accuracy or 0.0) for r in found))
        for (name, _), found in groups.items()
    ]


def accuracy_against_epsilon(runs: list[Run]) -> Chart | None:
    """Means with ± one standard deviation over seeds, and the Pareto front of the means."""
    every = points(runs)
    private = sorted((p for p in every if math.isfinite(p.epsilon)), key=lambda p: p.epsilon)
    if len(private) < 2:
        return None
    series = []
    for k, name in enumerate(dict.fromkeys(p.method for p in private)):
        mine = [p for p in private if p.method == name]
        low, high = (floats([p.mean + sign * (p.std or 0.0) for p in mine]) for sign in (-1, 1))
        notes = tuple(f"{len(p.accuracies)} run(s)" for p in mine)
        x, y = floats([p.epsilon for p in mine]), floats([p.mean for p in mine])
        series.append(Series(name, x, y, "points", low, high, f"c{k % 8}", joined=True, notes=notes))
    rounded = [
        (float(f"{p.epsilon:.2g}"), p.mean) for p in private
    ]  # σ is calibrated to a tolerance: 2.999 is no less than 3
    front = [private[i] for i in pareto(rounded)]
    if len(front) > 1:  # a single point is no line: the legend would name something that nobody sees
        line = floats([p.epsilon for p in front]), floats([p.mean for p in front])
        series.append(Series("Pareto front", *line, "steps", colour="ink", dash=True))
    without = sum(not math.isfinite(p.epsilon) for p in every)
    note = f" {without} setting(s) without a guarantee (ε = ∞) are left out." if without else ""
    validated = sum(run.validation is not None for run in runs)
    note += f" What private validation cost beside {validated} of the runs is not in it." if validated else ""
    shown, told = _front_in_words(front)
    return Chart(
        "pareto",
        "Accuracy against ε",
        "Each point is the mean over runs that differ by their seed alone; whiskers are ± one standard deviation over those "
        f"runs. ε is the true one, recomputed from what was released. {shown}{note}",
        told,
        epsilon_axis(private[0].epsilon, private[-1].epsilon),
        Axis("accuracy on the public test set", percent=True),
        tuple(series),
        height=440,
    )


def _front_in_words(front: list[Point]) -> tuple[str, str]:
    """What the caption and the description say of the front."""
    first, best = front[0], front[-1]
    if len(front) == 1:
        return (
            f"No setting here is more private or more accurate than {best.method} at ε = {upper(best.epsilon, 3)}.",
            f"The most private and the most accurate is {best.method}: {best.mean:.1%} at ε = {upper(best.epsilon, 3)}.",
        )
    return (
        "The dashed line is the Pareto front: no setting here is both more private and more accurate.",
        f"The front goes from {first.mean:.1%} at ε = {upper(first.epsilon, 3)} ({first.method}) to {best.mean:.1%} at "
        f"ε = {upper(best.epsilon, 3)} ({best.method}).",
    )


def epsilon_axis(low: float, high: float) -> Axis:
    """Logarithmic over more than a factor 20; not closer than 10 % to points that all have the same ε."""
    span = (0.9 * low, 1.1 * high) if high < 1.1 * low else None
    return Axis("ε (smaller is more private)", span=span, log=high > 20 * low, bound="upper")


def table(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    names = method_names(runs)
    header = ["run", "method", "ε", "δ", "accuracy", "certificate"]
    rows = []
    for place, run in enumerate(runs):
        state = "does not verify" if run.problems else "recomputed" if run.certificate is not None else "none"
        accuracy = "–" if run.accuracy is None else f"{run.accuracy:.1%}"
        rows.append([run.name, names[place], upper(run.spent, 4), small(run.delta), accuracy, state])
    return header, rows


def comparability(runs: list[Run]) -> list[str]:
    """What stands in the way of reading these runs as one comparison."""
    facts: dict[str, set[Any]] = {
        "private data (by fingerprint)": {r.summary["data"].get("fingerprint") for r in runs},
        "δ": {r.delta for r in runs},
        "unit of privacy": {r.guarantee.get("unit", "record") for r in runs},
        "neighbouring relation": {r.guarantee.get("neighbouring") for r in runs},
    }
    return [
        f"The runs differ in their {what}: their ε are not of the same kind."
        if what != "private data (by fingerprint)"
        else "The runs were trained on different private data: their accuracies are not of the same task."
        for what, values in facts.items()
        if len(values) > 1
    ]


def together(runs: list[Run]) -> list[str]:
    """That whoever is in several of these runs has spent the ε of more than one; a comparison says it of its own (`Run.note`)."""
    count = Counter(run.summary["data"].get("fingerprint") for run in runs if not run.note)
    shared = sum(number for records, number in count.items() if number > 1 and records is not None)
    if not shared:
        return []
    return [
        f"{shared} of these runs were trained on records that another was trained on, too: those have spent more than the ε of any "
        "one run (erlangen account adds runs up)."
    ]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={_words(v)}" for k, v in sorted(value.items()))
    if isinstance(value, list):
        return "×".join(_words(v) for v in value)
    return "" if value is None else str(value)
