"""ISO, REP, REP at half power and the metric `balanced` on the demo's rotated digits, tuned alike, many paired seeds, on a CPU.

    python benchmarks/rep_digits.py --out docs/results/rep-digits.json

A small case in minutes: 1,438 images of 8×8, ε = 3 by PLD. Learning rates are chosen on 360 held-out *training* images; the test
set is read once. Runs of one seed start from the same weights and draw the same batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from rich.progress import track
from tune import split

from erlangen.data import Dataset, load
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

#: name → mechanism and its options
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "iso": ("iso", {}), "rep": ("rep", {}), "rep:escnn:0.5": ("rep", {"power": 0.5}),
    "rep:balanced": ("rep", {"metric": "balanced"}),
}  # fmt: skip
RATES = (0.7, 1.0, 1.5, 2.2)
HELD_OUT = 360


def config(method: str, lr: float, seed: int, steps: int) -> TrainConfig:
    mechanism, options = METHODS[method]
    return TrainConfig(
        data="rotated_digits", model="c8-tiny", mechanism=mechanism, mechanism_options=options, epsilon=None,
        noise_multiplier=5.09218, batch=512.0, steps=steps, lr=lr, max_grad_norm=1.0, momentum=0.0, ema=0.9, seed=seed,
    )  # fmt: skip


def trained(what: str, cells: list[tuple[str, float, int]], data: Dataset, steps: int) -> list[dict[str, Any]]:
    rows = []
    for method, lr, seed in track(cells, what):
        session = Session(config(method, lr, seed, steps), data, f"seed{seed}")
        for _ in range(steps):
            session.step()
        rows.append({"mechanism": method, "lr": lr, "seed": seed, **session.evaluate()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    data = load("rotated_digits")
    grid = list(itertools.product(METHODS, RATES, (1000, 1001)))
    trials = trained("trials on held-out images", grid, split(data, HELD_OUT), options.steps)

    def held_out(method: str, lr: float) -> float:
        return statistics.fmean(r["test_accuracy"] for r in trials if (r["mechanism"], r["lr"]) == (method, lr))

    best = {method: max(RATES, key=lambda lr: held_out(method, lr)) for method in METHODS}
    runs = trained("runs", [(m, best[m], s) for s in range(options.seeds) for m in METHODS], data, options.steps)
    found = {"torch": torch.__version__, "steps": options.steps, "tuning": trials, "runs": runs}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for method in METHODS:
        values = [100 * r["test_accuracy"] for r in runs if r["mechanism"] == method]
        print(f"{method}: lr {best[method]}, {statistics.fmean(values):.2f} % over {len(values)} seeds")


if __name__ == "__main__":
    main()
