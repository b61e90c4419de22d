"""Draw GReDP's Figure 3, middle and right: accuracy along training at a target of ε = 2, from measured runs.

    python docs/img/make_gredp.py docs/results benchmarks/results

The first folder holds gredp-fig3-lenet.json: cell → runs with their curves, gathered from the folders of a reproduction. The
second holds gredp.json, whose runs of the networks on CIFAR-10 have curves too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

STYLE = {
    "DP-SGD without momentum": ("black", "--"), "DP-SGD": ("black", "-"), "AUTO-S": ("tab:blue", "-"),
    "Spectral-DP": ("tab:green", "-"),
    "GReDP": ("tab:orange", "-"), "GReDP as published": ("tab:red", ":"),
}  # fmt: skip
CIFAR = {"model3": "Model-3", "resnet20": "ResNet-20", "alexnet": "AlexNet"}
#: steps of an epoch
EPOCH = {"mnist": 120, "cifar10": 100}

Curve = list[dict[str, Any]]


def draw(axis: Any, name: str, x: list[float], curves: list[Curve]) -> None:
    """The mean over seeds as a line, every seed as dots."""
    colour, line = STYLE[name]
    values = [[100 * point["test_accuracy"] for point in curve] for curve in curves]
    axis.plot(x, [fmean(at) for at in zip(*values, strict=True)], line, color=colour, label=name)
    for one in values:
        axis.plot(x, one, ".", color=colour, alpha=0.3, markersize=4)


def finish(figure: Any, axes: Any, name: str) -> None:
    axes[0].set_ylabel("test accuracy, %")
    axes[-1].legend(frameon=False, loc="lower right", fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(Path(__file__).with_name(name), dpi=130)


def lenet(cells: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name in STYLE:
        curves = [run["curve"] for run in cells[name]]
        draw(axes[0], name, [point["step"] / EPOCH["mnist"] for point in curves[0]], curves)
        draw(axes[1], name, [point["epsilon"] for point in curves[0]], curves)
    axes[0].set_xlabel("epoch")
    axes[1].set_xlabel("true ε so far (PLD), δ = 1e-5")
    finish(figure, axes, "gredp-fig3.png")


def cifar(runs: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, (model, label) in zip(axes, CIFAR.items(), strict=True):
        for name in STYLE:
            curves = [run["curve"] for run in runs if run["key"][:2] == [f"gredp-fig3-{model}", name]]
            draw(axis, name, [point["step"] / EPOCH["cifar10"] for point in curves[0]], curves)
        axis.set_title(label)
        axis.set_xlabel("epoch")
    finish(figure, axes, "gredp-fig3-cifar.png")


def main() -> None:
    results, measured = map(Path, sys.argv[1:3])
    lenet(json.loads((results / "gredp-fig3-lenet.json").read_text())["cells"])
    cifar(json.loads((measured / "gredp.json").read_text())["runs"])


if __name__ == "__main__":
    main()
