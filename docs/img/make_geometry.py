"""Draws docs/img/geometry.png: what three geometries release for the same two-parameter gradients.

    python docs/img/make_geometry.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from erlangen.mechanisms import Diagonal, GaussianMechanism, StreamNoise
from erlangen.mechanisms.geodp import Direction

SIGMA, BOUND, RELEASES, SAMPLES = 1.0, 1.0, 1500, 8


def gradients() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.tensor([2.2, 0.7]) + torch.randn(SAMPLES, 2, generator=generator) * torch.tensor([0.5, 0.35])


def cloud(mechanism, g: torch.Tensor) -> torch.Tensor:
    return torch.stack([mechanism.release({"w": g}, SAMPLES)["w"] for _ in range(RELEASES)])


def main() -> None:
    g = gradients()
    metric = torch.tensor([1.9, 1 / 1.9])
    panels = {
        "ISO: clip in a ball,\nnoise in a ball": GaussianMechanism(SIGMA, BOUND, noise=StreamNoise(0)),
        "REP: clip in an ellipse,\nnoise along it": GaussianMechanism(
            SIGMA, BOUND, Diagonal({"w": metric}), StreamNoise(0)
        ),
        "GeoDP: direction and\nmagnitude apart": Direction(SIGMA, BOUND, StreamNoise(0)),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.1), sharex=True, sharey=True)
    for axis, (title, mechanism) in zip(axes, panels.items(), strict=True):
        points = cloud(mechanism, g)
        axis.scatter(*points.T, s=5, alpha=0.25, color="#4477aa", linewidths=0, label="private releases")
        axis.scatter(*g.T, s=22, color="#cc3311", marker="x", label="per-sample gradients")
        axis.annotate("", points.mean(0).tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.6})
        axis.set_title(title, fontsize=10)
        axis.axhline(0, color="0.85", lw=0.8, zorder=0)
        axis.axvline(0, color="0.85", lw=0.8, zorder=0)
        axis.set_aspect("equal")
        axis.set_xlim(-1.2, 3.6)
        axis.set_ylim(-0.5, 2.2)
    axes[0].plot([], [], color="black", lw=1.6, label="mean of the releases")  # the arrows have no entry of their own
    axes[0].legend(fontsize=9, loc="upper left", frameon=False, markerscale=1.5, borderpad=0, labelspacing=0.25)
    figure.suptitle(f"The same guarantee (σ = {SIGMA:g}, one release), three geometries", fontsize=11)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("geometry.png"), dpi=130, bbox_inches="tight", pad_inches=0.1)


if __name__ == "__main__":
    main()
