"""How time and memory of a private step grow: with the batch, the parameters, the image, the views and the group.

    python benchmarks/growth.py --json benchmarks/results/growth-cpu.json --plot docs/img/growth.png
    python benchmarks/growth.py --device cuda --large --json benchmarks/results/growth-cuda.json

One thing grows at a time; private and plain steps take turns. Time is the median over steps (on a CPU the processor's own, so
that other work on the machine does not count); memory is the peak of a process of its own over what it held after a first
tiny step (on a GPU: the allocator's peak). For every series: a straight line by
least squares with its R², and the exponent of growth between the smallest and the largest value. A convolution over
channels·N of a group of order N costs N² by itself, plain or private; everything else should grow linearly.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import resource
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from erlangen.gradients.rows import RowMap

START = {"batch": 32, "width": 16, "image": 16, "views": 1, "order": 1}
SMALL = {"batch": (16, 32, 64, 128, 192), "width": (8, 16, 24, 32, 48), "image": (8, 16, 24, 32), "views": (1, 2, 4, 6, 8),
         "order": (1, 2, 4, 8)}  # fmt: skip
LARGE = {"batch": (256, 512, 1024, 2048, 4096), "width": (32, 64, 96, 128, 192), "image": (16, 32, 48, 64),
         "views": (1, 2, 4, 8, 16), "order": (1, 2, 4, 8, 16)}  # fmt: skip
LARGE_START = {"batch": 512, "width": 64, "image": 32, "views": 1, "order": 1}
TINY = {"batch": 2, "width": 4, "image": 8, "views": 1, "order": 1}
#: what the horizontal axis counts
LABELS = {"batch": "records in the batch", "width": "parameters", "image": "pixels of an image", "views": "views of a record",
          "order": "order of the group C_N"}  # fmt: skip


def network(width: int, order: int, grouped: bool) -> nn.Module:
    """Three convolutions and a linear layer; steerable ones with ``width``/4 regular fields where the group grows."""
    if not grouped:
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(8 * width, 10),
        )  # fmt: skip
    from erlangen import equivariant as eq

    group = eq.cyclic(order)
    image, hidden = eq.trivial_fields(group, 3), eq.regular_fields(group, max(1, width // 4))
    return nn.Sequential(
        eq.SteerableConv2d(image, hidden, 3, padding=1), nn.ReLU(),
        eq.SteerableConv2d(hidden, hidden, 3, padding=1), nn.ReLU(),
        eq.SteerableConv2d(hidden, hidden, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(4 * hidden.size, 10),
    )  # fmt: skip


def private(module: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Any:
    from erlangen.accounting import Accountant
    from erlangen.gradients.tape import Tape
    from erlangen.mechanisms import GaussianMechanism, StreamNoise
    from erlangen.private import PrivateTraining
    from erlangen.sampling import PoissonSampler

    parameters = dict(module.named_parameters())
    mechanism = GaussianMechanism(1.0, 1.0, noise=StreamNoise(seed=0))
    mechanism.bind(parameters, batch)
    sampler = PoissonSampler(10 * batch, batch)
    training = PrivateTraining(module, optimizer, Tape(parameters), mechanism, sampler, Accountant(), None)
    training.install()
    return training


def measure(axis: str, at: dict[str, int], method: str, steps: int, device: str) -> dict[str, float]:
    """Median seconds and peak bytes of a step; ``x`` is the place on the axis."""
    if device == "cpu" and at != TINY:  # libraries are loaded and their workspaces made
        measure(axis, TINY, method, 1, device)
    clock = time.perf_counter if device == "cuda" else time.process_time
    torch.manual_seed(0)
    module = network(at["width"], at["order"], axis == "order").to(device)
    rows, parameters = at["batch"] * at["views"], sum(p.numel() for p in module.parameters())
    x, y = torch.randn(rows, 3, at["image"], at["image"], device=device), torch.randint(0, 10, (rows,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    training = private(module, optimizer, at["batch"]) if method == "private" else None
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    before = _held(device)
    times = []
    for k in range(steps + 2):  # two to warm up
        finish()
        start = clock()
        if training is not None:
            training.announce(RowMap.regular(at["batch"], at["views"]))
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        finish()
        if k >= 2:
            times.append(clock() - start)
    place = {"width": parameters, "image": at["image"] ** 2}.get(axis, at[axis])
    return {"x": place, "seconds": statistics.median(times), "bytes": _held(device) - before, "times": times}  # type: ignore[dict-item]


def _held(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _child(answer: Any, *args: Any) -> None:
    torch.set_num_threads(args[-1])
    answer.send(measure(*args[:-1]))


def alone(*args: Any) -> dict[str, float]:
    """In a process of its own, so that its peak is its own; on a GPU in this one, with the peak reset."""
    if args[-2] == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return measure(*args[:-1])
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there, *args))
    process.start()
    there.close()
    result = here.recv()
    process.join()
    return result


def fit(points: list[dict[str, float]], what: str) -> dict[str, float]:
    """A straight line, its R², and the exponent of growth from the first point to the last."""
    x, y = (np.array([p[key] for p in points], dtype=float) for key in ("x", what))
    slope, intercept = np.polyfit(x, y, 1)
    rest = float(((y - slope * x - intercept) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum()) or 1.0
    exponent = math.log(max(y[-1], 1e-12) / max(y[0], 1e-12)) / math.log(x[-1] / x[0])
    return {"slope": float(slope), "intercept": float(intercept), "r2": 1.0 - rest / total, "exponent": exponent}


def plot(series: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(series), figsize=(3.1 * len(series), 5.4), constrained_layout=True)
    for column, (axis, one) in enumerate(series.items()):
        for row, (what, scale, label) in enumerate((("seconds", 1e3, "ms a step"), ("bytes", 2**-20, "peak MB"))):
            ax = axes[row][column]
            for method, colour in (("plain", "0.55"), ("private", "tab:blue")):
                points, line = one[method]["points"], one[method][what]
                x = np.array([p["x"] for p in points], dtype=float)
                ax.plot(x, [p[what] * scale for p in points], "o", color=colour, label=method)
                ax.plot(x, (line["slope"] * x + line["intercept"]) * scale, "-", color=colour, lw=1)
            ax.set_ylim(bottom=0)
            ax.locator_params(axis="x", nbins=4)
            ax.text(0.04, 0.93, f"R² = {one['private'][what]['r2']:.3f}", transform=ax.transAxes, va="top", fontsize=8)
            ax.set_xlabel(LABELS[axis] if row else "")
            ax.set_ylabel(label if not column else "")
    axes[0][0].legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--large", action="store_true", help="sizes for a GPU")
    parser.add_argument("--axes", nargs="*", default=list(START), choices=list(START))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    start, sizes = (LARGE_START, LARGE) if args.large else (START, SMALL)
    series: dict[str, Any] = {}
    for axis in args.axes:
        points: dict[str, list[dict[str, float]]] = {"plain": [], "private": []}
        for value in sizes[axis]:
            for method, found in points.items():
                found.append(alone(axis, {**start, axis: value}, method, args.steps, args.device, args.threads))
        series[axis] = {
            method: {"points": found, "seconds": fit(found, "seconds"), "bytes": fit(found, "bytes")}
            for method, found in points.items()
        }
        line = series[axis]["private"]
        print(f"{axis:6}  time R² {line['seconds']['r2']:.3f}, exponent {line['seconds']['exponent']:.2f};  "
              f"memory R² {line['bytes']['r2']:.3f}, exponent {line['bytes']['exponent']:.2f}", flush=True)  # fmt: skip
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} thread(s)"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {"benchmark": "growth", "date": str(date.today()), "machine": machine, "torch": torch.__version__, "commit": commit,
              "start": start, "steps": args.steps, "series": series}  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result) + "\n")
    if args.plot:
        plot(series, args.plot, f"One step, private and plain: {machine}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
