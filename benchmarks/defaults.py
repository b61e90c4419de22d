"""Are the defaults of `erlangen train` good? Each option moved around them, over data sets, sizes and ε, on held-out images.

    python benchmarks/defaults.py run --data digits shapes mnist-1000@14 --log benchmarks/results/defaults.jsonl
    python benchmarks/defaults.py table benchmarks/results/defaults.jsonl

What is held out is a part of the *training* images; no test set is read. ``mnist-5000@14`` means 5,000 records shrunk to
14×14. Averages of the weights are post-processing, so each run is scored under several. A run in the log is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from erlangen.accounting import noise_multiplier
from erlangen.data import Dataset, from_arrays, load
from erlangen.training.config import TrainConfig
from erlangen.training.ema import EMA
from erlangen.training.session import Session

#: what is moved: batch as records / batch, epochs, rate as a multiple of (1 − momentum)/C, and plain options. A ``walk``
#: sets the rate by the noise: over the run it moves each weight by about this much
BASE: dict[str, Any] = {"fraction": 6, "epochs": 30, "rate": 1.0, "walk": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "rate ×1": {},
    "batch N/3": {"fraction": 3},
    "batch N/12": {"fraction": 12},
    "15 epochs": {"epochs": 15},
    "60 epochs": {"epochs": 60},
    "rate /2": {"rate": 0.5},
    "rate ×2": {"rate": 2.0},
    "rate ×4": {"rate": 4.0},
    "C = 0.1": {"max_grad_norm": 0.1},
    "C = 0.3": {"max_grad_norm": 0.3},
    "C = 3": {"max_grad_norm": 3.0},
    "no momentum": {"momentum": 0.0},
    "cosine": {"schedule": "cosine"},
    "cosine, rate ×2": {"schedule": "cosine", "rate": 2.0},
    "cosine, rate ×4": {"schedule": "cosine", "rate": 4.0},
    "walk 0.05": {"walk": 0.05},
    "walk 0.1": {"walk": 0.1},
    "walk 0.2": {"walk": 0.2},
    "walk 0.3": {"walk": 0.3},
    "walk 0.1, cosine": {"walk": 0.1, "schedule": "cosine"},
    "walk 0.2, cosine": {"walk": 0.2, "schedule": "cosine"},
    "walk 0.1, C = 0.1": {"walk": 0.1, "max_grad_norm": 0.1},
    "walk 0.2, C = 0.1": {"walk": 0.2, "max_grad_norm": 0.1},
    "walk 0.3, cosine": {"walk": 0.3, "schedule": "cosine"},
    "walk 0.2, cosine, C = 0.1": {"walk": 0.2, "schedule": "cosine", "max_grad_norm": 0.1},
    "walk 0.3, cosine, C = 0.1": {"walk": 0.3, "schedule": "cosine", "max_grad_norm": 0.1},
    "walk 0.2, batch N/3": {"walk": 0.2, "fraction": 3},
    "walk 0.2, 15 epochs": {"walk": 0.2, "epochs": 15},
    "walk 0.2, 60 epochs": {"walk": 0.2, "epochs": 60},
    "adam 1e-3": {"optimizer": "adam"},
    "adam 3e-3": {"optimizer": "adam", "lr": 3e-3},
}
AVERAGES = (0.0, 0.9, 0.95, 0.99)


def config_of(variant: str, epsilon: float, seed: int, units: int, **fixed: Any) -> TrainConfig:
    """The variant as options, with σ calibrated for its own batch and steps."""
    options = {**BASE, **VARIANTS[variant], **fixed}
    fraction, epochs, rate, walk = (options.pop(key) for key in BASE)
    batch = max(1, min(units, 2 ** round(float(np.log2(max(2.0, units / fraction))))))
    steps = round(epochs * units / batch)
    config = TrainConfig(epsilon=epsilon, seed=seed, ema=0.0, batch=batch, steps=steps, **options).settled(units)
    assert config.delta is not None
    sigma = _sigma(epsilon, config.delta, batch / units, steps)
    rate = rate if walk is None else walk * batch / (sigma * steps**0.5)
    lr = config.lr if config.optimizer == "adam" else rate * (1 - config.momentum) / config.max_grad_norm
    return dataclasses.replace(config, lr=lr, epsilon=None, noise_multiplier=sigma)


@functools.cache
def _sigma(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    return noise_multiplier(epsilon, delta, sample_rate, steps)


def held_out(name: str) -> Dataset:
    """A data set whose test part is a held-out part of its training images."""
    if name == "shapes":
        return shapes()
    source, _, size = name.partition("@")
    source, _, count = source.partition("-")
    data = load(source)
    x, y = data.x_train, data.y_train
    if size:
        factor = x.shape[-1] // int(size)
        x = x.reshape(*x.shape[:2], int(size), factor, int(size), factor).mean((3, 5))
    order = np.random.default_rng(0).permutation(len(x))
    held = order[: min(2000, len(x) // 5)]
    kept = order[len(held) :][: int(count) if count else None]
    return dataclasses.replace(
        data, name=name, x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held], unit=None
    )


def shapes(patients: int = 400, images: int = 2, side: int = 16) -> Dataset:
    """Made-up colour photographs of discs, squares, rings and crosses; each patient has a hue, a size and a place."""
    rng = np.random.default_rng(0)
    grid = np.mgrid[:side, :side].astype(float)
    x, y, owner = [], [], []
    for patient in range(patients + 200):
        hue, radius, label = rng.uniform(0.3, 1, 3), rng.uniform(3, 6), rng.integers(4)
        for _ in range(images):
            v, u = grid - (side - 1) / 2 - rng.uniform(-2, 2, (2, 1, 1))
            r, box = np.hypot(u, v), np.maximum(abs(u), abs(v))
            inside = (r < radius, box < radius * 0.9, (r < radius) & (r > radius / 2),
                      (np.minimum(abs(u), abs(v)) < radius / 3) & (box < radius))[label]  # fmt: skip
            picture = inside[..., None] * hue * 200 + rng.normal(40, 25, (side, side, 3))
            x.append(picture.clip(0, 255).astype(np.uint8))
            y.append(label)
            owner.append(patient)
    n = patients * images
    pictures, labels = np.stack(x), np.array(y)
    arrays = {"x_train": pictures[:n], "y_train": labels[:n], "x_test": pictures[n:], "y_test": labels[n:]}
    return from_arrays("shapes", {**arrays, "patient": np.array(owner[:n])}, unit="patient")


def measure(data: Dataset, config: TrainConfig, limit: float) -> dict[str, Any]:
    """Held-out accuracy under each average, or how far the run came in ``limit`` seconds of one process."""
    started = time.process_time()
    session = Session(dataclasses.replace(config, unit="patient" if data.unit is not None else None), data)
    averages = [EMA(session.model, decay) if decay else None for decay in AVERAGES]
    for step in range(session.config.steps):
        session.step()
        for average in averages:
            if average is not None:
                average.update()
        if time.process_time() - started > limit:
            return {"stopped": f"{step + 1} of {session.config.steps} steps"}
    scores = {}
    for decay, average in zip(AVERAGES, averages, strict=True):
        session.ema = average
        scores[str(decay)] = round(session.evaluate()["test_accuracy"], 4)
    return {"epsilon_pld": round(session.epsilon(), 4), "accuracy": scores}


def run(args: argparse.Namespace) -> None:
    done = {_key(row) for row in read(args.log)} if args.log.exists() else set()
    for name, seed, epsilon in itertools.product(args.data, args.seeds, args.epsilon):
        data = held_out(name)
        units = len(data) if data.unit is None else len(np.unique(data.unit))
        for variant in args.variants or VARIANTS:
            if (name, variant, epsilon, seed) in done:
                continue
            config = config_of(variant, epsilon, seed, units, device=args.device)
            started = time.process_time()
            row = {"data": name, "variant": variant, "epsilon": epsilon, "seed": seed, "units": units,
                   "batch": config.batch, "steps": config.steps, "lr": round(config.lr, 6),
                   "sigma": round(config.noise_multiplier or 0, 4), "delta": config.delta,
                   **measure(data, config, args.limit), "seconds": round(time.process_time() - started, 1)}  # fmt: skip
            with args.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def read(*logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


def _key(row: dict[str, Any]) -> tuple[str, str, float, int]:
    return row["data"], row["variant"], row["epsilon"], row["seed"]


def table(rows: list[dict[str, Any]], average: str) -> str:
    """Mean over seeds, for each data set and ε; the last columns compare with the rate ×1, seed by seed."""
    cells: dict[tuple[str, float], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "accuracy" in row:
            cells[row["data"], row["epsilon"]][row["variant"]][row["seed"]] = 100 * row["accuracy"][average]
    columns = sorted(cells)
    lines = ["| | " + " | ".join(f"{d}, ε = {e:g}" for d, e in columns) + " | mean gain | worst |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for variant in VARIANTS:
        here = {c: cells[c][variant] for c in columns if cells[c].get(variant)}
        pairs = [[v[s] - cells[c]["rate ×1"][s] for s in v if s in cells[c]["rate ×1"]] for c, v in here.items()]
        gains = [mean(differences) for differences in pairs if differences]
        if here:
            shown = [f"{mean(here[c].values()):.1f}" if c in here else "" for c in columns]
            tail = [f"{mean(gains):+.1f}", f"{min(gains):+.1f}"] if gains else ["", ""]
            lines.append("| " + " | ".join([variant, *shown, *tail]) + " |")
    return "\n".join(lines)


def show(args: argparse.Namespace) -> None:
    rows = [r for r in read(*args.logs) if r["seed"] in args.seeds and r["variant"] in args.variants]
    print(table(rows, args.average))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--data", nargs="+", required=True, help="digits, shapes, or NAME-RECORDS[@SIDE]")
    runs.add_argument("--epsilon", type=float, nargs="+", default=[3.0, 1.0, 8.0])
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    runs.add_argument("--variants", nargs="+", choices=VARIANTS)
    runs.add_argument("--limit", type=float, default=60.0, help="processor seconds after which a run is given up")
    runs.add_argument("--device", default="auto")
    runs.add_argument("--log", type=Path, required=True)
    runs.set_defaults(do=run)
    tables = commands.add_parser("table")
    tables.add_argument("logs", type=Path, nargs="+")
    tables.add_argument("--average", choices=[str(a) for a in AVERAGES], default="0.99")
    tables.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of which runs")
    tables.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    tables.set_defaults(do=show)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
