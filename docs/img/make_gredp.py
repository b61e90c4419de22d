"""Draw GReDP's Figure 3, middle and right, for LeNet-5: accuracy along training at a target of ε = 2, from measured runs.

    python docs/img/make_gredp.py docs/results

The folder holds gredp-fig3-lenet.json: cell → runs with their curves, gathered from the folders of a reproduction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

STYLE = {
    "DP-SGD without momentum": ("black", "--"), "DP-SGD": ("black", "-"), "AUTO-S": ("tab:blue", "-"),
    "Spectral-DP": ("tab:green", "-"),
    "GReDP": ("tab:orange", "-"), "GReDP as published": ("tab:red", ":"),
}  # fmt: skip


def main() -> None:
    cells = json.loads((Path(sys.argv[1]) / "gredp-fig3-lenet.json").read_text())["cells"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, (colour, line) in STYLE.items():
        runs = cells[name]
        points = [[run["curve"][k] for run in runs] for k in range(len(runs[0]["curve"]))]
        mean = [100 * fmean(p["test_accuracy"] for p in at) for at in points]
        for axis, x in ((axes[0], [at[0]["step"] / 120 for at in points]), (axes[1], [at[0]["epsilon"] for at in points])):
            axis.plot(x, mean, line, color=colour, label=name)
            for k in range(len(runs)):
                axis.plot(x, [100 * at[k]["test_accuracy"] for at in points], ".", color=colour, alpha=0.3, markersize=4)
    axes[0].set_xlabel("epoch")
    axes[0].set_ylabel("test accuracy, %")
    axes[1].set_xlabel("true ε so far (PLD), δ = 1e-5")
    axes[1].legend(frameon=False, loc="lower right", fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(Path(__file__).with_name("gredp-fig3.png"), dpi=130)


if __name__ == "__main__":
    main()
