"""The second kind of preset: figures that measure releases (errors, runtime) instead of training a network.

A `Measurement` names a function and the points at which it is evaluated. It is listed, shortened and run like a
`Preset`, and its rows look like those of a table: one per point and quantity, with the true ε of the release measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erlangen.experiments.presets import spread

if TYPE_CHECKING:
    from dp_accounting import DpEvent

#: (options, seed) → quantities by name
Measure = Callable[[Mapping[str, Any], int], dict[str, float]]
DELTA = 1e-5


@dataclass(frozen=True)
class Point:
    """One point of a figure: plain options of the measuring function.

    ``release`` is the one whose error or runtime is measured, as (mechanism, options, σ); None where nothing is
    released. ``quick`` overrides options where the point is too large for a first look.
    """

    name: str
    options: Mapping[str, Any]
    release: tuple[str, Mapping[str, Any], float] | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)

    def event(self) -> DpEvent | None:
        """One un-amplified release."""
        if self.release is None:
            return None
        import torch

        from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism

        name, options, sigma = self.release
        context = Context(sigma, make_clipping("flat", 1.0), StreamNoise(0), torch.nn.Linear(2, 2), 1.0, options)
        mechanism = make_mechanism(name, context)
        mechanism.bind(dict(context.module.named_parameters()), 1.0)
        return mechanism.event()


@dataclass(frozen=True)
class Measurement:
    """One figure. ``measure`` is "module:function"; ``units`` says what each quantity is."""

    name: str
    paper: str
    title: str
    measure: str
    cells: tuple[Point, ...]
    units: Mapping[str, str]
    seeds: int = 10
    note: str = ""
    #: ours, beside the paper's own tables and figures
    beside: bool = False

    def data(self) -> list[str]:
        """The data sets that its points name; a figure of releases says in its note what it looks at."""
        return sorted({point.options["data"] for point in self.cells if "data" in point.options})

    def quick(self) -> Measurement:
        """One seed at a few small points: shows that it runs. It is no result, and says so."""
        cells = tuple(dataclasses.replace(p, options={**p.options, **p.quick}) for p in spread(self.cells))
        return dataclasses.replace(self, cells=cells, seeds=1, note="QUICK: few and small points, one seed; no result")

    def privacy(self) -> Iterator[dict[str, Any]]:
        """The true ε of one release at every point, one by one."""
        return (point_privacy(point) for point in self.cells)

    def function(self) -> Measure:
        module, _, name = self.measure.partition(":")
        return getattr(importlib.import_module(module), name)


def point_privacy(point: Point) -> dict[str, Any]:
    from erlangen.accounting import epsilon
    from erlangen.accounting.words import in_json

    event = point.event()
    spent: dict[str, float | str] = {"pld": 0.0, "rdp": 0.0}
    if event is not None:
        found = {m: epsilon(event, DELTA, m) for m in ("pld", "rdp")}  # type: ignore[arg-type]
        spent = {m: in_json(e) for m, e in found.items()}
    sigma = point.release[2] if point.release else 0.0
    return {
        "cell": point.name, "epsilon": spent, "delta": DELTA, "noise_multiplier": sigma, "sample_rate": 1.0,
        "steps": 1 if event is not None else 0, "paper": None, "claimed_epsilon": None,
    }  # fmt: skip


def run_measurement(
    chosen: Measurement, out: Path, first_seed: int = 0, watch: Callable[[str, int, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Evaluate every point for every seed. Finished ones in ``out`` are kept: an interrupted figure goes on."""
    measure, found = chosen.function(), out / "measured.jsonl"
    known: dict[tuple[str, int], dict[str, float]] = {}
    if found.exists():
        for line in found.read_text().splitlines():
            row = json.loads(line)
            known[row["cell"], row["seed"]] = row["values"]
    for seed in range(first_seed, first_seed + chosen.seeds):
        for point in chosen.cells:
            key = (point.name, seed)
            if key not in known:
                known[key] = measure(point.options, seed)
                with open(found, "a") as file:
                    file.write(json.dumps({"cell": point.name, "seed": seed, "values": known[key]}) + "\n")
            if watch is not None:
                watch(point.name, seed, dict(known[key]))
    rows = []
    for point in chosen.cells:
        mine = [known[point.name, s] for s in range(first_seed, first_seed + chosen.seeds)]
        rows += _rows(chosen, point, mine)
    result = {"preset": chosen.name, "paper": chosen.paper, "title": chosen.title, "note": chosen.note, "rows": rows}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _rows(chosen: Measurement, point: Point, found: list[dict[str, float]]) -> list[dict[str, Any]]:
    privacy = point_privacy(point)
    rows = []
    for quantity in found[0]:
        values = [f[quantity] for f in found]
        rows.append({
            "cell": point.name, "quantity": quantity, "unit": chosen.units.get(quantity, quantity), "paper": None,
            "mean": statistics.fmean(values), "median": statistics.median(values),
            "std": statistics.stdev(values) if len(values) > 1 else None, "seeds": len(values), "values": values,
            "options": dict(point.options), "epsilon": privacy["epsilon"], "delta": privacy["delta"],
        })  # fmt: skip
    return rows


__all__ = ["Measurement", "Point", "point_privacy", "run_measurement"]
