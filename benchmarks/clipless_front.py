"""The Pareto fronts of clipless training, and the search for their settings, with data on the device and one evaluation.

    python benchmarks/clipless_front.py --tune --data mnist --device cuda --json tune.json
    python benchmarks/clipless_front.py --data mnist,fashion_mnist --seeds 3 --device cuda --json front.json

``--tune`` holds out a sixth of the *training* set and trains every network and learning rate at ε = 3; the test set is
not read. What it finds belongs into `erlangen.experiments.clipless.FRONTS`. Without ``--tune`` the cells of the preset
``clipless-fig5`` are trained as `erlangen reproduce` would, in one process, with σ calibrated once per ε.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from erlangen.accounting import noise_multiplier
from erlangen.data import Dataset, load
from erlangen.experiments import preset
from erlangen.experiments.clipless import FRONTS, LOSS, config
from erlangen.experiments.tuning import split
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

NETWORKS: dict[str, dict[str, Any]] = {
    "linear": {"model": "lipschitz-mlp", "model_options": {}},
    "dense 64": {"model": "lipschitz-mlp", "model_options": {"hidden": [64]}},
    "dense 256": {"model": "lipschitz-mlp", "model_options": {"hidden": [256]}},
    "patches": {"model": "lipschitz-patches", "model_options": {"patch": 4, "width": 32}},
    "patches, mixed": {"model": "lipschitz-patches", "model_options": {"patch": 4, "width": 32, "mix": 32}},
    "LeNet": {"model": "lipschitz-lenet", "model_options": {"width": 8}},
}
RATES = (0.03, 0.1, 0.3)
#: tried on the best network and rate
LOSSES: tuple[dict[str, Any], ...] = (
    {"name": "hinge", "margin": 0.05},
    {"name": "hinge", "margin": 0.4},
    {"name": "cross-entropy", "temperature": 16.0},
)


@functools.cache
def sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    return noise_multiplier(epsilon, delta, rate, steps)


def fit(settings: TrainConfig, data: Dataset, device: str) -> dict[str, float]:
    """One run; σ is calibrated here, once for all runs that share ε, rate and steps."""
    settings = dataclasses.replace(settings, device=device).settled(len(data))
    assert settings.epsilon is not None
    assert settings.delta is not None
    noise = sigma(settings.epsilon, settings.delta, settings.batch / len(data), settings.steps)
    started = time.perf_counter()
    session = Session(dataclasses.replace(settings, epsilon=None, noise_multiplier=noise), data)
    while session.step_count < settings.steps:
        session.step()
    scores = session.evaluate()
    return {**scores, "epsilon": session.epsilon(), "seconds": time.perf_counter() - started}


def tune(name: str, device: str, steps: int | None) -> list[dict[str, Any]]:
    data, rows = split(load(name), 1 / 6), []

    def attempt(label: str, lr: float, loss: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {**NETWORKS[label], "lr": lr, "mechanism_options": {"loss": loss}, "seed": 0}
        changes |= {"batch": min(config(name, "optimal", 3.0).batch, len(data))}
        found = fit(config(name, "optimal", 3.0, **changes, **({"steps": steps} if steps else {})), data, device)
        row = {"data": name, "network": label, "lr": lr, "loss": loss, **found}
        score = f"{100 * found['test_accuracy']:.2f} %  {found['seconds']:.1f} s"
        print(f"  {name} {label:16} lr {lr:<5} {' '.join(map(str, loss.values())):20} {score}", flush=True)
        rows.append(row)
        return row

    for label in NETWORKS:
        for lr in RATES:
            attempt(label, lr, LOSS)
    best = max(rows, key=lambda r: r["test_accuracy"])
    for loss in LOSSES:
        attempt(best["network"], best["lr"], loss)
    return rows


def front(names: list[str], seeds: int, device: str, steps: int | None, methods: list[str]) -> list[dict[str, Any]]:
    cells = preset("clipless-fig5").cells
    rows = []
    for name in names:
        data = load(name)
        for cell in cells:
            method = cell.name.split()[1]
            if cell.config.data != name or method.lower() not in methods:  # type: ignore[union-attr]
                continue
            settings = cell.config if steps is None else dataclasses.replace(cell.config, steps=steps)  # type: ignore[union-attr]
            settings = dataclasses.replace(settings, batch=min(settings.batch, len(data)))
            found = [fit(dataclasses.replace(settings, seed=seed), data, device) for seed in range(seeds)]
            values = [100 * f["test_accuracy"] for f in found]
            spread = statistics.stdev(values) if seeds > 1 else None
            row = {"cell": cell.name, "mean": statistics.fmean(values), "std": spread, "values": values}
            row |= {"epsilon": found[0]["epsilon"], "delta": 1e-5, "seconds": [f["seconds"] for f in found]}
            rows.append(row)
            print(
                f"  {cell.name:32} {row['mean']:.2f} ± {spread or 0:.2f}  ε = {row['epsilon']:.3f}  {row['seconds'][0]:.1f} s",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", help="comma-separated names")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="optimal,local,global,iso")
    parser.add_argument("--steps", type=int, help="in place of the preset's; then it is no result")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.data.split(",")
    for name in names:
        if name not in FRONTS:  # a small data set, to try the script
            FRONTS[name] = (len(load(name)), *FRONTS["mnist"][1:])
    if arguments.tune:
        rows = [row for name in names for row in tune(name, arguments.device, arguments.steps)]
    else:
        rows = front(names, arguments.seeds, arguments.device, arguments.steps, arguments.methods.split(","))
    if arguments.json:
        facts = {
            "torch": torch.__version__,
            "device": arguments.device,
            "tune": arguments.tune,
            "steps": arguments.steps,
        }
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
