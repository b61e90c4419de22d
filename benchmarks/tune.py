"""Tune a preset's learning rate and clipping bound on a split of its *training* set, before the test set is read once.

    python benchmarks/tune.py eq-tuned-trials --lr 2 3 --clip 2 --holdout 5000 --out benchmarks/results/tune.json

Every cell of the preset gets the same grid; cells that differ in these two numbers only are one cell. The held-out part of
the training set is drawn by a fixed seed; a cell with a target ε has it on the smaller training set too, a cell with a fixed
σ keeps its σ. What tuning costs in privacy is not counted here, as it is not in the papers; the file says how many trials
there were. It is written after every trial, and the same command goes on where it stopped. The test set is not read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resumable import Budget, OutOfTime, Results

from erlangen.data import Dataset, load
from erlangen.experiments import preset
from erlangen.training.config import TrainConfig
from erlangen.training.ema import EMA
from erlangen.training.session import Session


@dataclass(frozen=True)
class Trial:
    cell: str
    config: TrainConfig
    seed: int

    @property
    def given(self) -> dict[str, Any]:
        c = self.config
        return {
            "cell": self.cell,
            "lr": c.lr,
            "clip": c.max_grad_norm,
            "seed": self.seed,
            "steps": c.steps,
            "batch": c.batch,
        }

    @property
    def family(self) -> str:
        return self.config.data


def split(data: Dataset, holdout: int) -> Dataset:
    """The training set without ``holdout`` records, which stand in for the test set."""
    order = np.random.default_rng(0).permutation(len(data))
    kept, held = order[holdout:], order[:holdout]
    unit = None if data.unit is None else data.unit[kept]
    return dataclasses.replace(
        data, x_train=data.x_train[kept], y_train=data.y_train[kept], x_test=data.x_train[held], y_test=data.y_train[held],
        unit=unit,
    )  # fmt: skip


def trials(args: argparse.Namespace) -> Iterator[Trial]:
    """The grid over every cell, each configuration once, seed by seed: all are compared before one is repeated."""
    cells = [cell for cell in preset(args.preset).cells if args.only is None or any(part in cell.name for part in args.only)]
    options = {"steps": args.steps, "batch": args.batch, "device": args.device, "max_physical_batch": args.physical}
    changes = {name: value for name, value in options.items() if value is not None}
    for seed in range(args.seeds):
        seen: set[str] = set()
        for cell, lr, clip in itertools.product(cells, args.lr, args.clip):
            config = dataclasses.replace(cell.config, lr=lr, max_grad_norm=clip, seed=1000 + seed, **changes)
            if config.to_json() not in seen:
                seen.add(config.to_json())
                yield Trial(cell.name, config, seed)


def train(trial: Trial, data: Dataset, parts: Sequence[float] = ()) -> dict[str, Any]:
    """What the held-out records say at the end; with ``parts``, also of averages over other last parts of the steps."""
    started = time.perf_counter()
    session = Session(trial.config, data)
    averages = {h: EMA(session.model, 1 - 1e-9, h) for h in parts}
    for _ in range(session.config.steps):
        session.step()
        for average in averages.values():
            average.update()
    scores = {name.replace("test_", "heldout_"): value for name, value in session.evaluate().items()}
    own, others = session.ema, {}
    for h, session.ema in averages.items():
        others[f"{h:g}"] = session.evaluate()["test_accuracy"]
    session.ema = own
    row = {**trial.given, **scores, "epsilon": session.epsilon(), "seconds": round(time.perf_counter() - started, 1)}
    return {**row, "heldout_accuracy_by_average": others} if others else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--clip", type=float, nargs="+", required=True)
    parser.add_argument("--holdout", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="only the cells whose name contains one of these")
    parser.add_argument("--averages", type=float, nargs="+", default=[], help="h: also of averages over the last h-th part")
    parser.add_argument("--steps", type=int, help="in place of the preset's")
    parser.add_argument("--batch", type=int, help="in place of the preset's")
    parser.add_argument("--physical", type=int, help="rows in memory at once, in place of the preset's")
    parser.add_argument("--device")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no trial after so many seconds")
    parser.add_argument("--out", type=Path, help="default tune-PRESET.json")
    args = parser.parse_args()
    out = args.out or Path(f"tune-{args.preset}.json")
    budget, results = Budget(args.budget), Results(out, {"trials": ("cell", "lr", "clip", "seed")})
    results.hold({"preset": args.preset, "holdout": args.holdout}, unsaid={})
    parts: dict[str, Dataset] = {}
    try:
        for trial in results.left("trials", trials(args)):
            budget.check()
            name = trial.config.data
            parts[name] = parts[name] if name in parts else split(load(name), args.holdout)
            row = train(trial, parts[name], args.averages)
            where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
            results.keep("trials", [row], torch=torch.__version__, device=where)
            print(json.dumps(row), flush=True)
    except OutOfTime:
        print("out of time: run the same command again")


if __name__ == "__main__":
    main()
