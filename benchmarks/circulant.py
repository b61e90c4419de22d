"""From which size on is a block-circulant layer faster than the dense one? Plain and private, measured in one run.

    python benchmarks/circulant.py [--threads 1] [--json out.json]

Every figure is circulant time / dense time of the same step (forward, backward, and for "private" the clipped and
noised gradient): below 1 the circulant layer wins. Medians over alternating repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from erlangen.circulant import CirculantConv2d, CirculantLinear
from erlangen.gradients import Tape, attach, detach
from erlangen.mechanisms import GaussianMechanism


def plain_step(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        layer.zero_grad()
        layer(x).square().mean().backward()

    return step


def private_step(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    parameters = dict(layer.named_parameters())
    tape, mechanism = Tape(parameters), GaussianMechanism(1.0, 1.0)
    mechanism.bind(parameters, x.shape[0])

    def step() -> None:
        attach(layer, tape)
        layer(x).square().mean().backward()
        with torch.no_grad():
            mechanism.accumulate(tape.gradients())
            mechanism.finish(x.shape[0])
        detach(layer)

    return step


def ratio(circulant: Callable[[], None], dense: Callable[[], None], repeats: int) -> float:
    """Alternating measurements, so that a busy machine slows both alike; on one thread, of processor time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats + 1):
        for step, out in zip((circulant, dense), times, strict=True):
            start = clock()
            step()
            if k:
                out.append(clock() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def cases() -> list[tuple[str, int, int, nn.Module, nn.Module, torch.Tensor]]:
    out: list[tuple[str, int, int, nn.Module, nn.Module, torch.Tensor]] = []
    for size in (128, 256, 512, 1024, 2048):
        for block in (8, 32, 128):
            x = torch.randn(128, size, requires_grad=True)
            out.append(("linear", size, block, CirculantLinear(size, size, block), nn.Linear(size, size), x))
    for channels in (32, 64, 128):
        for block in (4, 8, 16):
            x = torch.randn(16, channels, 16, 16, requires_grad=True)
            dense = nn.Conv2d(channels, channels, 3, padding=1)
            out.append(
                ("conv 3×3", channels, block, CirculantConv2d(channels, channels, 3, block, padding=1), dense, x)
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    print(f"{'layer':10} {'size':>6} {'block':>6} {'plain':>8} {'private':>8}   (circulant / dense)")
    for kind, size, block, circulant, dense, x in cases():
        plain = ratio(plain_step(circulant, x), plain_step(dense, x), arguments.repeats)
        private = ratio(private_step(circulant, x), private_step(dense, x), arguments.repeats)
        rows.append({"layer": kind, "size": size, "block": block, "plain": plain, "private": private})
        print(f"{kind:10} {size:6d} {block:6d} {plain:8.2f} {private:8.2f}")
    if arguments.json:
        facts = {"torch": torch.__version__, "threads": arguments.threads, "repeats": arguments.repeats}
        arguments.json.write_text(json.dumps({**facts, "ratios": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
