"""Many runs at once on one GPU: time of a step of the ensembles behind the tables of REP, GReDP and GeoDP.

    python benchmarks/ensembles.py --json
    python benchmarks/ensembles.py --only rep --profile        # the kernels of one step
    python benchmarks/ensembles.py --only alexnet alexnet-spectral alexnet-circulant   # what filters and blocks cost

Made-up records of the real sizes; every step is launched operation by operation (no CUDA graph), after two steps of warm-up.
The time of a row is that of a step divided by members × expected batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from gredp_geodp_tasks import TASKS
from provenance import commit

from erlangen.data import Dataset
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble


@dataclass(frozen=True)
class Case:
    """An ensemble as a table trains it: its members, the steps that are timed, and the precision of products."""

    configs: list[TrainConfig]
    steps: int
    precision: str | None = None
    rows: int | None = None


def rep(members: int) -> Case:
    """ISO, SHUFFLE and REP of the C8 network on rotated MNIST, a third each."""
    configs = []
    for k in range(members):
        mechanism, seed = ("iso", "shuffle", "rep")[k % 3], k // 3
        options: dict[str, Any] = {} if mechanism == "iso" else {"metric": "escnn"}
        if mechanism == "shuffle":
            options["seed"] = seed
        configs.append(TrainConfig(
            data="rotated_mnist", model="c8-cnn", model_options={"field_counts": (4, 8, 16)}, mechanism=mechanism,
            mechanism_options=options, epsilon=None, noise_multiplier=1.0, delta=1e-5, batch=60_000 / 938, steps=1000,
            lr=0.125, momentum=0.0, ema=0.999, seed=seed,
        ))  # fmt: skip
    return Case(configs, 20, "bfloat16")


def table(name: str, method: str, members: int, steps: int) -> Case:
    task = TASKS[name]
    setting = task.where(method, tuple(task.settings))[0]
    configs = [task.config(method, setting, (1.0, 1.0, 0.9), seed, "auto") for seed in range(members)]
    return Case(configs, steps, task.precision, task.rows)


def cases() -> dict[str, Case]:
    return {
        "rep": rep(60),
        "lenet": table("gredp-table1", "DP-SGD", 48, 10),
        "geodp-cnn": table("geodp-table2", "DP", 48, 1),
        "model3": table("gredp-model3", "DP-SGD", 12, 6),
        "resnet20": table("gredp-resnet20", "DP-SGD", 12, 4),
        "alexnet": table("gredp-alexnet", "DP-SGD", 6, 4),
        "model3-spectral": table("gredp-model3", "Spectral-DP", 12, 6),
        "resnet20-spectral": table("gredp-resnet20", "Spectral-DP", 12, 4),
        "alexnet-spectral": table("gredp-alexnet", "Spectral-DP", 6, 4),
        "model3-circulant": table("gredp-model3", "GReDP, circulant", 12, 6),
        "alexnet-circulant": table("gredp-alexnet", "GReDP, circulant", 6, 4),
        "alexnet-circulant-spectral": table("gredp-alexnet", "Spectral-DP, circulant", 6, 4),
        "resnet3": table("geodp-table3", "DP", 16, 1),
    }


def made_up(config: TrainConfig, records: int | None) -> Dataset:
    shape, all_of_them = ((3, 32, 32), 50_000) if config.data == "cifar10" else ((1, 28, 28), 60_000)
    rng, records = np.random.default_rng(0), records or all_of_them
    x, y = rng.standard_normal((records, *shape), dtype=np.float32), rng.integers(0, 10, records)
    return Dataset(config.data, x, y, None, None, 10)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, profile: bool = False, records: int | None = None) -> dict[str, Any]:
    data = made_up(case.configs[0], records)
    precision = getattr(torch, case.precision) if case.precision else None
    ensemble = Ensemble(case.configs, data, precision=precision, rows=case.rows, graph=False)
    ensemble.run(2)
    wait(ensemble.device)
    started = time.perf_counter()
    ensemble.run(case.steps)
    wait(ensemble.device)
    seconds = (time.perf_counter() - started) / case.steps
    if profile:
        with torch.profiler.profile() as found:
            ensemble.run(1)
            wait(ensemble.device)
        order = "self_cuda_time_total" if ensemble.device.type == "cuda" else "self_cpu_time_total"
        print(found.key_averages().table(sort_by=order, row_limit=25), file=sys.stderr)
    members = len(case.configs)
    return {
        "members": members, "batch": ensemble.config.batch, "rows": ensemble.rows, "ms": 1e3 * seconds,
        "us_row": 1e6 * seconds / (members * ensemble.config.batch),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(cases()))
    parser.add_argument("--profile", action="store_true", help="print the costliest operations of one step")
    parser.add_argument("--small", action="store_true", help="two members, batches of 16, one step: to see that it runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {}
    for name, case in cases().items():
        if args.only and name not in args.only:
            continue
        if args.small:
            few = [replace(c, batch=16) for c in case.configs[:2]]
            case = replace(case, configs=few, steps=1, rows=32)
        found[name] = measure(case, args.profile, 500 if args.small else None)
        print(f"{name:26} {found[name]['ms']:8.2f} ms a step, {found[name]['us_row']:6.3f} µs a row", file=sys.stderr)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if args.json:
        print(json.dumps({
            "benchmark": "ensembles", "date": str(date.today()), "device": device, "torch": torch.__version__,
            "commit": commit(), "cases": found,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
