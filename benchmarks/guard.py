"""Has anything become slower? Compares fresh figures with the stored ones; exit code 1 on a loss of more than 15 %.

    python benchmarks/step.py --model lenet --batch 256 --methods plain erlangen --json > build/lenet.json
    python benchmarks/guard.py build/lenet.json

Only ratios of one run are compared (private step / plain step, private memory / plain memory): they do not depend much on
whose machine it is. A fresh figure is compared with the stored one of the same benchmark, model, batch and device, with the best
where there are several. A side that failed is a loss, and so is a ratio that is stored and was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ALLOWED = 0.15
#: most that a private step may cost, in plain steps, on a CPU with two threads
BARS = {"lenet": 1.4, "opacus-cnn": 1.4, "resnet9": 1.4, "eq-resnet9": 1.6}


@dataclass(frozen=True)
class Comparison:
    """One ratio, stored and fresh; the larger the slower."""

    what: str
    stored: float | None
    fresh: float
    bar: float | None = None

    @property
    def loss(self) -> float | None:
        return None if self.stored is None else self.fresh / self.stored - 1.0

    def failed(self, allowed: float) -> bool:
        """Whether more than ``allowed`` of the stored figure is lost; its bar is another matter."""
        return math.isnan(self.fresh) or (self.loss is not None and self.loss > allowed)

    def line(self, allowed: float) -> str:
        stored = "none stored" if self.stored is None else f"{self.stored:.3f}"
        change = "" if self.loss is None else f"{self.loss:+.1%}"
        over = f"  above the bar {self.bar:g}" if self.bar is not None and self.fresh > self.bar else ""
        return f"  {'LOSS' if self.failed(allowed) else 'ok':4}  {self.what:44} {self.fresh:6.3f}  ({stored}) {change}{over}"


def settings(result: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for two figures to be comparable."""
    told = {**result.get("arguments", {}), **result}  # the device by its own name: ratios of another GPU are others
    keys = ("benchmark", "model", "options", "batch", "threads", "views", "physical", "device")
    flags = ("compile", "float32", "graph", "separate", "contiguous")  # what a file does not mention was off
    return {key: told.get(key) for key in keys} | {key: bool(told.get(key)) for key in flags}


def stored_like(result: dict[str, Any], folder: Path = RESULTS) -> dict[str, float]:
    """The best stored ratios with the same settings."""
    stored = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    alike = [kept for kept in stored if isinstance(kept, dict) and "methods" in kept and settings(kept) == settings(result)]
    found = [ratios(kept) for kept in alike]
    return {kind: min(each[kind] for each in found if kind in each) for kind in set().union(*found)}


def failures(result: dict[str, Any]) -> list[str]:
    """The sides of the ratio that are missing, and why."""
    sides = {name: result.get("methods", {}).get(name, {"failed": "not measured"}) for name in ("plain", "erlangen")}
    return [f"{name}: {' '.join(map(str, _lines(side['failed'])))}" for name, side in sides.items() if "failed" in side]


def _lines(said: Any) -> list[Any]:
    return said[-1:] if isinstance(said, list) else [said]


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Time and memory of our private step in plain ones."""
    plain, private = (result["methods"].get(name, {}) for name in ("plain", "erlangen"))
    found = {"time": private.get("ratio")}
    if private.get("peak_mb") and plain.get("peak_mb"):
        found["memory"] = private["peak_mb"] / plain["peak_mb"]
    return {name: float(value) for name, value in found.items() if value is not None}


def compare(result: dict[str, Any], folder: Path = RESULTS) -> list[Comparison]:
    before, fresh, told = stored_like(result, folder), ratios(result), settings(result)
    name = f"{told['benchmark']} {told['model']}, batch {told['batch']}"
    bar = BARS.get(str(told["model"])) if told["benchmark"] == "step" else None
    return [
        Comparison(f"{name}: {kind}", before.get(kind), fresh.get(kind, math.nan), bar if kind == "time" else None)
        for kind in ("time", "memory")
        if kind in fresh or kind in before
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fresh", nargs="+", type=Path, help="JSON files of benchmarks/step.py or benchmarks/gpu.py")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--allowed", type=float, default=ALLOWED)
    parser.add_argument("--bars", action="store_true", help="also fail where a ratio is above its bar")
    args = parser.parse_args()
    fresh = {path: json.loads(path.read_text()) for path in args.fresh}
    rows = [row for result in fresh.values() for row in compare(result, args.results)]
    print("private / plain, fresh (stored):")
    for row in rows:
        print(row.line(args.allowed))
    missing = [f"{path.name}, {why}" for path, result in fresh.items() for why in failures(result)]
    if missing:
        sys.exit("guard: no ratio of a private step to a plain one (methods plain and erlangen):\n  " + "\n  ".join(missing))
    over = [row for row in rows if args.bars and row.bar is not None and row.fresh > row.bar]
    if over or any(row.failed(args.allowed) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
