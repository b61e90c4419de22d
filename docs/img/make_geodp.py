"""Draw GeoDP's Figures 3, 4 and 6 from measured results.

    python docs/img/make_geodp.py docs/results

The folder holds geodp-fig3.json, geodp-fig4.json and geodp-fig6.json, the ``result.json`` of ``erlangen reproduce``; a
file that is missing is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

STYLE = {
    "DP": ("black", "-"), "DP, C tuned": ("dimgray", "--"), "AUTO-S": ("tab:blue", "--"),
    "GeoDP as published β=1": ("tab:red", "-"), "GeoDP as published β=0.1": ("tab:orange", "-"),
    "GeoDP as published β=0.01": ("gold", "-"), "direction": ("tab:green", "-"), "angles β=0.1": ("tab:purple", ":"),
    "GeoDP as published": ("tab:red", "-"), "shrink": ("tab:olive", "--"), "angles": ("tab:purple", ":"),
}  # fmt: skip


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"geodp-{name}.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def label_of(row: dict[str, Any]) -> str:
    return next(k for k in sorted(STYLE, key=len, reverse=True) if row["cell"].endswith(k))


def lines(axis: Any, rows: list[dict[str, Any]], x: str, quantity: str, keep: dict[str, Any]) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        options = row["options"]
        if row["quantity"] == quantity and all(options[k] == v for k, v in keep.items()):
            found.setdefault(label_of(row), []).append((options[x], row["mean"]))
    for name, points in found.items():
        color, dash = STYLE[name]
        axis.plot(*zip(*sorted(points), strict=True), dash, color=color, label=name, marker=".")
    axis.set_xscale("log")
    places = sorted({v for points in found.values() for v, _ in points})
    if x in ("d", "batch"):
        axis.set_xticks(places, [f"{v:,}" for v in places], fontsize=7)
        axis.minorticks_off()
    axis.set_xlabel({"sigma": "σ", "d": "d", "batch": "B", "beta": "β"}[x])
    axis.grid(alpha=0.3)


def figure3(rows: list[dict[str, Any]], out: Path) -> None:
    panels = [
        ("sigma", {"d": 5000, "batch": 2048}),
        ("d", {"sigma": 8.0, "batch": 4096}),
        ("batch", {"sigma": 8.0, "d": 10_000}),
    ]
    names = {
        "direction_mse": "squared error of the angles",
        "gradient_mse": "squared error of the gradient",
        "cosine": "cosine",
    }
    figure, axes = plt.subplots(3, 3, figsize=(11, 9), sharex="col")
    for k, (quantity, title) in enumerate(names.items()):
        for axis, (x, keep) in zip(axes[k], panels, strict=True):
            lines(axis, rows, x, quantity, keep)
            if quantity != "cosine":
                axis.set_yscale("log")
        axes[k][0].set_ylabel(title)
    finish(figure, axes[0][0], out / "geodp-fig3.png")


def figure4(rows: list[dict[str, Any]], out: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axis, d in zip(axes, (20_000, 10_000, 5000), strict=True):
        here = [r for r in rows if r["quantity"] == "direction_mse" and r["options"]["d"] == d]
        published = sorted((r["options"]["beta"], r["mean"]) for r in here if "as published" in r["cell"])
        axis.plot(*zip(*published, strict=True), "-", color="tab:red", marker=".", label="GeoDP as published")
        for name in ("DP", "AUTO-S", "direction", "angles β=0.1"):
            value = next(r["mean"] for r in here if r["cell"].endswith(f"4096 {name}"))
            axis.axhline(value, color=STYLE[name][0], linestyle=STYLE[name][1], label=name)
        axis.set_title(f"d = {d}")
        axis.set_xlabel("β")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("squared error of the angles")
    finish(figure, axes[0], out / "geodp-fig4.png")


def figure6(rows: list[dict[str, Any]], out: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (x, keep) in zip(axes, (("d", {"batch": 500}), ("batch", {"d": 20_000})), strict=True):
        lines(axis, rows, x, "seconds", keep)
        axis.set_yscale("log")
    axes[0].set_ylabel("processor seconds of a release")
    finish(figure, axes[0], out / "geodp-fig6.png")


def finish(figure: Any, first: Any, path: Path) -> None:
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.09 if figure.get_figheight() > 5 else 0.17, 1, 1))
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(__file__).parent
    for name, draw in (("fig3", figure3), ("fig4", figure4), ("fig6", figure6)):
        rows = read(folder, name)
        if rows:
            draw(rows, out)


if __name__ == "__main__":
    main()
