"""Draw accuracy against ε of ISO, SHUFFLE and REP on rotated MNIST and Fashion-MNIST, and what REP gains, from measured runs.

    python docs/img/make_rep.py docs/results

The folder holds rep-table1.json, rep-table1-full.json, rep-fashion-full.json and rep-fashion-metrics.json, as
benchmarks/rep_table1.py writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLOURS = {"iso": "black", "shuffle": "tab:gray", "rep": "tab:blue", "rep:escnn:0.5": "tab:orange", "rep:balanced": "tab:green"}
NAMES = {"iso": "ISO", "shuffle": "SHUFFLE", "rep": "REP", "rep:escnn:0.5": "REP, half power", "rep:balanced": "REP, balanced"}
TITLES = {
    "rep-table1.json": "rotated MNIST, tuned with a quarter of the steps",
    "rep-fashion-full.json": "rotated Fashion-MNIST, tuned at full length",
}


def accuracy(axis: Any, table: list[dict[str, Any]]) -> None:
    epsilons = [row["epsilon"]["pld"] for row in table]
    for name, colour in COLOURS.items():
        if name not in table[0]["cells"]:
            continue
        cells = [row["cells"][name] for row in table]
        axis.errorbar(
            epsilons, [c["mean"] for c in cells], [c["error"] for c in cells], fmt=".-", color=colour, capsize=2,
            label=NAMES[name],
        )  # fmt: skip
    axis.set_ylabel("test accuracy, %")
    axis.legend(frameon=False, loc="lower right")


def gain(axis: Any, table: list[dict[str, Any]]) -> None:
    axis.axhline(0, color="black", linewidth=0.8)
    for name, aside in (("rep", 0.97), ("rep:escnn:0.5", 1.03)):
        gaps = [row[f"{name}-iso"] for row in table]
        epsilons = [row["epsilon"]["pld"] for row in table]
        axis.errorbar(
            [aside * e for e in epsilons], [g["mean"] for g in gaps], [g["half_width_95"] for g in gaps], fmt="o",
            color=COLOURS[name], capsize=3,
        )  # fmt: skip
    for epsilon, gap in zip(epsilons, gaps, strict=True):
        axis.annotate(f"n={gap['pairs']}", (epsilon, -4.8), ha="center", fontsize=7, color="gray")
    axis.set_ylim(-5, 2.5)
    axis.set_ylabel("gain over ISO, points (95 %)")
    axis.set_xlabel("ε (PLD), δ = 1e-5")


def at_full_length(axes: Any, table: list[dict[str, Any]]) -> None:
    """Open marks: what trials of all steps chose, at the noise levels where that was run."""
    open_mark = {"fmt": "D", "markerfacecolor": "white", "markersize": 5, "capsize": 2}
    for row in table:
        epsilon = row["epsilon"]["pld"]
        for name, cell in row["cells"].items():
            axes[0].errorbar(1.1 * epsilon, cell["mean"], cell["error"], color=COLOURS[name], **open_mark)
        for name, aside in (("rep", 1.1), ("rep:escnn:0.5", 1.16), ("rep:balanced", 1.22)):
            gap = row[f"{name}-iso"]
            axes[1].errorbar(aside * epsilon, gap["mean"], gap["half_width_95"], color=COLOURS[name], **open_mark)
    axes[0].plot([], [], "D", color="gray", markerfacecolor="white", markersize=5, label="tuned at full length")
    axes[0].plot([], [], "D", color=COLOURS["rep:balanced"], markerfacecolor="white", markersize=5, label=NAMES["rep:balanced"])
    axes[0].legend(frameon=False, loc="lower right")


def metrics(content: dict[str, Any]) -> None:
    """A dot for every seed: ISO, SHUFFLE and REP with several metrics, at one noise level."""
    (row,) = content["table"]
    names = {
        "shuffle": "SHUFFLE", "iso": "ISO", "rep:paper": "REP paper", "rep:paper:0.5": "REP paper, half power", "rep": "REP escnn",
        "rep:escnn:0.5": "REP escnn, half power",
    }  # fmt: skip
    figure, axis = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    axis.axvline(row["cells"]["iso"]["mean"], color="black", linewidth=0.8, linestyle=":")
    for place, name in enumerate(names):
        colour = COLOURS.get(name, COLOURS["rep"])
        seeds = [100 * run["test_accuracy"] for run in content["runs"] if run["mechanism"] == name]
        axis.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.35, markersize=5)
        axis.plot(row["cells"][name]["mean"], place, "|", color=colour, markersize=18, markeredgewidth=2)
    axis.set_yticks(range(len(names)), list(names.values()))
    axis.set_xlabel("test accuracy, %: seeds and mean (dotted: ISO's mean)")
    axis.set_title(f"rotated Fashion-MNIST, σ = {row['sigma']}, ε = {row['epsilon']['pld']:.2f}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parent / "rep-metrics.png", dpi=150)


def main() -> None:
    folder = Path(sys.argv[1])
    metrics(json.loads((folder / "rep-fashion-metrics.json").read_text()))
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True, height_ratios=[3, 2], layout="constrained")
    for column, (name, title) in enumerate(TITLES.items()):
        table = json.loads((folder / name).read_text())["table"]
        accuracy(axes[0, column], table)
        gain(axes[1, column], table)
        if column == 0:
            at_full_length(axes[:, 0], json.loads((folder / "rep-table1-full.json").read_text())["table"])
        axes[0, column].set_title(title)
        axes[1, column].set_xscale("log")
        axes[1, column].set_xlim(0.37, 3.6)
        axes[1, column].set_xticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
        axes[1, column].minorticks_off()
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parent / "rep.png", dpi=150)


if __name__ == "__main__":
    main()
