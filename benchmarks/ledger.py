"""What the ledger costs: the time of one accounted release, and its share of a LeNet step.

    python benchmarks/ledger.py [--steps 100000] [--json]

Measured in one process: `spend` alone (flushes included), the file it leaves, and the step of a plain LeNet at batch
256 that it is compared with (`--no-step` leaves torch out). Goal: below 1 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from erlangen.accounting import Release, gaussian, poisson, read_ledger
from erlangen.accounting.ledger import Ledger


def measure_ledger(steps: int, folder: Path) -> dict[str, float]:
    """Seconds per accounted release, flushes included, and the worst single one."""
    release = Release(poisson(0.01, gaussian(1.0)), 1.0, 1.0, 0.01, mechanism="iso")
    path = folder / "ledger.jsonl"
    worst = 0.0
    start = time.perf_counter()
    with Ledger.create(path, data="benchmark") as ledger:
        for _ in range(steps):
            before = time.perf_counter()
            ledger.spend(release)
            worst = max(worst, time.perf_counter() - before)
    total = time.perf_counter() - start
    assert read_ledger(path).steps == steps
    return {"seconds_per_step": total / steps, "worst_seconds": worst, "bytes": path.stat().st_size}


def measure_step(batch: int, threads: int, repeats: int) -> float:
    """Median seconds of a plain (not private) SGD step of LeNet: the smallest step one could compare with."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        many = measure_ledger(options.steps, Path(folder) / "many")
        few = measure_ledger(min(1000, options.steps), Path(folder) / "few")
    result: dict[str, object] = {
        "steps": options.steps,
        "cpus": os.cpu_count(),
        "microseconds_per_step": 1e6 * many["seconds_per_step"],
        "microseconds_per_step_first_1000": 1e6 * few["seconds_per_step"],
        "worst_milliseconds": 1e3 * many["worst_seconds"],
        "bytes": many["bytes"],
    }
    if not options.no_step:
        step = measure_step(options.batch, options.threads, options.repeats)
        result["lenet_step_milliseconds"] = 1e3 * step
        result["overhead_percent"] = 100 * many["seconds_per_step"] / step
        result["overhead_percent_first_1000"] = 100 * few["seconds_per_step"] / step
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:34} {value:.4g}" if isinstance(value, float) else f"{name:34} {value}")


if __name__ == "__main__":
    main()
