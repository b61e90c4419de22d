"""Tune a preset's learning rate and clipping bound on a split of its *training* set, before the test set is read once.

    python benchmarks/tune.py gredp-table1 --lr 0.05 0.1 0.2 --clip 0.3 1.0 --out benchmarks/results/tune.json

Every cell of the preset gets the same grid. The held-out part of the training set is drawn by a fixed seed; noise is
calibrated for the smaller training set, so that the tuning runs have the preset's ε. What tuning costs in privacy is not
counted here, as it is not in the papers; the log says how many trials there were.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from datetime import date

import numpy as np

from erlangen.data import Dataset, load
from erlangen.experiments import preset
from erlangen.training.session import Session


def split(data: Dataset, holdout: int) -> Dataset:
    """The training set without ``holdout`` records, which stand in for the test set."""
    order = np.random.default_rng(0).permutation(len(data))
    kept, held = order[holdout:], order[:holdout]
    unit = None if data.unit is None else data.unit[kept]
    return dataclasses.replace(
        data, x_train=data.x_train[kept], y_train=data.y_train[kept], x_test=data.x_train[held], y_test=data.y_train[held],
        unit=unit,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--clip", type=float, nargs="+", required=True)
    parser.add_argument("--holdout", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    chosen, trials = preset(args.preset), []
    for cell in chosen.cells:
        data = split(load(cell.config.data), args.holdout)
        for lr, clip, seed in itertools.product(args.lr, args.clip, range(args.seeds)):
            started = time.perf_counter()
            session = Session(dataclasses.replace(cell.config, lr=lr, max_grad_norm=clip, seed=1000 + seed), data)
            for _ in range(session.config.steps):
                session.step()
            row = {"cell": cell.name, "lr": lr, "clip": clip, "seed": seed, "steps": session.config.steps,
                   **session.evaluate(), "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip
            trials.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"preset": args.preset, "date": str(date.today()), "holdout": args.holdout, "trials": trials}, file, indent=1)


if __name__ == "__main__":
    main()
