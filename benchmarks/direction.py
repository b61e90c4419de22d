"""How well does each mechanism keep the direction of the gradient, at equal true privacy? Synthetic gradients, public.

    python benchmarks/direction.py [--d 20000 --batch 4096 --sigma 8] [--json out.json]

Per-sample gradients are s_i·(t + ρ·z_i): a true direction t that turns a little every step (cosine 0.95 between
neighbours), Gaussian z_i with ‖ρ·z_i‖ ≈ ρ, and log-normal sizes s_i. Every mechanism sees the same gradients and has
the same event, Poisson(Gaussian(σ)); the figure is the mean cosine of its output to t over the last half of the steps.
"ISO, C tuned" is the best of a grid; momentum is a moving average of released gradients (post-processing, free).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from erlangen.gradients import PerSampleGradients
from erlangen.mechanisms import Angles, Direction, GaussianMechanism, Mechanism, Shrink, StreamNoise
from erlangen.mechanisms.clipping import AutoS

BOUNDS = (0.5, 2.0, 8.0, 32.0)
CHUNK = 256


def mechanisms(sigma: float) -> dict[str, Mechanism]:
    out: dict[str, Mechanism] = {f"iso C={c:g}": GaussianMechanism(sigma, c, noise=StreamNoise(1)) for c in BOUNDS}
    out["auto-s"] = GaussianMechanism(sigma, AutoS(1.0), noise=StreamNoise(1))
    out["geodp direction"] = Direction(sigma, 8.0, StreamNoise(1))
    out["geodp shrink"] = Shrink(sigma, 8.0, StreamNoise(1))
    out["geodp angles β=0.1"] = Angles(sigma, 8.0, StreamNoise(1), beta=0.1)
    return out


def turned(t: Tensor, cosine: float, generator: torch.Generator) -> Tensor:
    """A unit vector at the given cosine to t."""
    other = torch.randn(t.numel(), generator=generator)
    other -= (other @ t) * t
    return cosine * t + math.sqrt(1 - cosine**2) * other / other.norm()


def simulate(d: int, batch: int, sigma: float, spread: float, steps: int, momentum: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(d, generator=generator)
    t /= t.norm()
    each = mechanisms(sigma)
    for mechanism in each.values():
        mechanism.bind({"w": t}, batch)
    averages = {name: torch.zeros(d) for name in each}
    found: dict[str, list[float]] = {}
    for step in range(steps):
        t = turned(t, 0.95, generator)
        for start in range(0, batch, CHUNK):
            rows = min(CHUNK, batch - start)
            g = t + spread / math.sqrt(d) * torch.randn(rows, d, generator=generator)
            g *= torch.randn(rows, 1, generator=generator).mul_(0.7).exp_()
            for mechanism in each.values():
                mechanism.accumulate(PerSampleGradients.from_dense({"w": g}))
        for name, mechanism in each.items():
            out = mechanism.finish(batch)["w"]
            averages[name] = momentum * averages[name] + (1 - momentum) * out
            if step >= steps // 2:
                found.setdefault(name, []).append(float(out @ t / out.norm()))
                found.setdefault(f"{name} + momentum", []).append(float(averages[name] @ t / averages[name].norm()))
    return {name: sum(values) / len(values) for name, values in found.items()}


def tuned(found: dict[str, float]) -> dict[str, float]:
    """ISO at its best bound, and everything else."""
    out = {}
    for tail in ("", " + momentum"):
        out[f"iso, C tuned{tail}"] = max(found[f"iso C={c:g}{tail}"] for c in BOUNDS)
    return {**out, **{name: value for name, value in found.items() if not name.startswith("iso C")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--sigma", type=float, default=8.0)
    parser.add_argument("--spread", type=float, default=5.0, help="ρ, the size of the noise of a sample's direction")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {k: getattr(arguments, k) for k in ("d", "batch", "sigma", "spread", "steps", "momentum")}
    found = tuned(simulate(**settings))
    for name, value in found.items():
        print(f"{name:32} cosine {value:6.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**settings, "cosine": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
