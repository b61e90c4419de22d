"""GeoDP, Spectral-DP and GReDP steps against an ISO (DP-SGD) step on the same network, measured in one run.

    python benchmarks/geodp.py --d 1000000 [--threads 1] [--json out.json]
    python benchmarks/geodp.py --model alexnet --methods iso spectral gredp        on a network of the papers
    python benchmarks/geodp.py --d 10000000 --check        accuracy of the hyperspherical conversion, no steps

A step is forward, backward, per-sample clipping, noise and update. Figures are medians over alternating repeats, as
ratios to ISO; unless a model is named, the network is a plain convolutional one with about d parameters. On one CPU
thread the clock is that of the process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erlangen.gradients import Tape, attach, detach
from erlangen.mechanisms import Context, StreamNoise, make_mechanism
from erlangen.mechanisms.clipping import Flat
from erlangen.mechanisms.hyperspherical import from_spherical, to_spherical
from erlangen.models import make_model

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "iso": ("iso", {}),
    "geodp direction": ("geodp", {"form": "direction"}),
    "geodp shrink": ("geodp", {"form": "shrink"}),
    "geodp angles": ("geodp", {"form": "angles"}),
    "geodp as published": ("geodp", {"as_published": True, "beta": 0.1}),
    "gredp": ("gredp", {}),
    "gredp as published": ("gredp", {"as_published": "complex"}),
    "spectral": ("spectral", {}),
}


#: what networks of the papers see; the others see CIFAR-10's images
SHAPES = {"lenet": (1, 28, 28), "geodp-cnn": (1, 28, 28)}


def network(d: int) -> nn.Module:
    """Six 3×3 convolutions of one width and a linear head; 54·w² + O(w) parameters."""
    w = max(4, round(math.sqrt(d / 54) / 4) * 4)
    layers: list[nn.Module] = [nn.Conv2d(3, w, 3, padding=1), nn.ReLU()]
    for k in range(6):
        layers += [nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), *([nn.AvgPool2d(2)] if k in (1, 3) else [])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 10))


def step_of(model: nn.Module, method: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    name, options = METHODS[method]
    parameters = dict(model.named_parameters())
    mechanism = make_mechanism(name, Context(1.0, Flat(1.0), StreamNoise(0), model, x.shape[0], options))
    mechanism.bind(parameters, x.shape[0])
    tape = Tape(parameters)
    tape.metric = mechanism.metric

    def step() -> None:
        attach(model, tape)
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            mechanism.accumulate(tape.gradients())
            for key, g in mechanism.finish(x.shape[0]).items():
                parameters[key].sub_(g, alpha=1e-6)
        detach(model)

    return step


def measure(steps: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds, alternating the methods so that a busy machine slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(repeats + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if k:
                times[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def wall_clock(device: str) -> Callable[[], float]:
    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def check(d: int) -> dict[str, float]:
    """Relative error of the round trip: plain, with zeros, and at both ends of float32's range."""
    g = torch.randn(d, generator=torch.Generator().manual_seed(0))
    holes = g.clone()
    holes[torch.rand(d, generator=torch.Generator().manual_seed(1)) < 0.5] = 0.0
    cases = {"normal": g, "half zeros": holes, "×1e30": g * 1e30, "×1e-30": g * 1e-30}
    out = {}
    for name, v in cases.items():
        start = time.perf_counter()
        back = from_spherical(*to_spherical(v)).double()
        seconds = time.perf_counter() - start
        out[name] = float((back - v.double()).norm() / v.double().norm())
        print(f"d = {d:,}  {name:12} relative error {out[name]:.1e}   round trip {seconds:.2f} s")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=1_000_000, help="number of parameters, about")
    parser.add_argument("--model", help="a registered network in place of that of about d parameters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="iso is always measured")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=32, help="side of the square inputs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="accuracy of the conversion only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": arguments.threads, "device": arguments.device}
    if arguments.check:
        result: dict[str, Any] = {"d": arguments.d, "relative_error": check(arguments.d)}
    else:
        torch.manual_seed(0)
        shape = SHAPES.get(arguments.model, (3, arguments.image, arguments.image))
        model = (make_model(arguments.model, shape, 10) if arguments.model else network(arguments.d)).to(arguments.device)
        x = torch.randn(arguments.batch, *shape, device=arguments.device)
        y = torch.randint(0, 10, (arguments.batch,), device=arguments.device)
        d = sum(p.numel() for p in model.parameters())
        alone = arguments.device == "cpu" and arguments.threads == 1
        clock = time.process_time if alone else wall_clock(arguments.device)
        steps = {name: step_of(model, name, x, y) for name in METHODS if name == "iso" or name in arguments.methods}
        times = measure(steps, arguments.repeats, clock)
        ratios = {name: t / times["iso"] for name, t in times.items()}
        print(f"d = {d:,}, batch {arguments.batch}, {'×'.join(map(str, shape))}; ISO step {times['iso']:.3f} s")
        for name, r in ratios.items():
            print(f"{name:20} {r:5.2f} × ISO")
        result = {
            "d": d,
            "model": arguments.model,
            "batch": arguments.batch,
            "image": shape[-1],
            "iso_seconds": times["iso"],
            "ratio_to_iso": ratios,
        }
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
