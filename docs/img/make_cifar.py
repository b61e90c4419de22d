"""Draw accuracy against ε of the D4-equivariant ResNet-9 on CIFAR-10, from measured runs.

    python docs/img/make_cifar.py docs/results

The folder holds cifar-d4.json, cifar-d4-eps2.json, cifar-d4-prior.json and cifar-d4-literal.json: runs with their configuration
and every look at the test set.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

#: ε (RDP) → test accuracy of the equivariant paper's Table 6
PAPER = {1: 60.59, 2: 72.10, 3: 75.96, 4: 78.27, 6: 80.26, 8: 81.62}
COLOURS = plt.get_cmap("viridis")


def runs(folder: Path) -> list[dict[str, Any]]:
    tables = [json.loads((folder / name).read_text()) for name in ("cifar-d4.json", "cifar-d4-eps2.json")]
    return [*(run for cell in tables[0]["cells"].values() for run in cell), *tables[1]["runs"]]


def others(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """ε (PLD) and test accuracy of other runs: from a prior, or of the paper's own network."""
    cells = json.loads((folder / f"cifar-d4-{name}.json").read_text())["cells"]
    found = [run for cell in cells.values() for run in cell]
    return [run["epsilon"]["pld"] for run in found], [100 * run["metrics"][-1]["test_accuracy"] for run in found]


def final(axis: Any, found: list[dict[str, Any]], folder: Path) -> None:
    axis.plot(list(PAPER), list(PAPER.values()), "o--", color="gray", label="paper (its ε is RDP's)", markersize=4)
    last: dict[tuple[float, int, int], list[float]] = {}
    for run in found:
        key = (run["config"]["epsilon"], run["config"]["steps"], run["config"]["views"])
        last.setdefault(key, []).append(100 * run["metrics"][-1]["test_accuracy"])
    ours = sorted((k, v) for k, v in last.items() if k[1] <= 135 * k[0] and k[2] == 4)
    middle = [statistics.median(v) for _, v in ours]
    axis.plot([k[0] for k, _ in ours], middle, "_", color="black", markersize=14, label="ours: seeds and median")
    for (epsilon, steps, views), values in last.items():
        mark = "^" if views == 8 else "." if steps <= 135 * epsilon else "x"
        label = {"x": f"{steps:,} steps", "^": "8 views"}.get(mark)
        mark = "1" if steps == 400 else mark
        axis.plot([epsilon] * len(values), values, mark, color="black", label=label, markersize=4 if mark == "^" else None)
    axis.plot(*others(folder, "prior"), ".", color="tab:blue", label="from a prior, averaged answers")
    axis.plot(*others(folder, "literal"), "+", color="tab:red", label="the paper's network, our run")
    axis.set_xlabel("ε (PLD), δ = 1e-5")
    axis.set_ylabel("test accuracy, %")
    axis.legend(frameon=False, loc="lower right", fontsize=8)


def on_the_way(axis: Any, found: list[dict[str, Any]]) -> None:
    named = set()
    for run in sorted((r for r in found if r["config"]["views"] == 4), key=lambda r: r["config"]["steps"]):
        steps, looks = run["config"]["steps"], run["metrics"]
        label = None if steps in named else f"ε = {run['config']['epsilon']:g}, {steps:,} steps"
        named.add(steps)
        colour = COLOURS((steps / 2160) ** 0.5 * 0.9)
        axis.plot(
            [m["step"] for m in looks], [100 * m["test_accuracy"] for m in looks], ".-", color=colour, label=label
        )
    axis.set_xscale("log")
    axis.set_xticks([45, 135, 270, 540, 1080, 2160], ["45", "135", "270", "540", "1080", "2160"])
    axis.minorticks_off()
    axis.set_xlabel("step of 8192 records × 4 views")
    axis.legend(frameon=False, loc="lower right", fontsize=8)


def main() -> None:
    folder = Path(sys.argv[1])
    found = runs(folder)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    final(left, found, folder)
    on_the_way(right, found)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(Path(__file__).with_name("cifar-d4.png"), dpi=130)


if __name__ == "__main__":
    main()
