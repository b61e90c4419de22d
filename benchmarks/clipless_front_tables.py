"""What `clipless_front.py` shows of its rows: the front and the chosen settings as Markdown, and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path

from resumable import Row

from erlangen.experiments.clipless import EPSILONS, SPLITS

METHODS = (*SPLITS, "iso")


def words(setting: Row) -> str:
    """A setting in a line."""
    options = "".join(f" {v}" for v in setting["model_options"].values())
    rest = f"margin {setting['loss']['margin']:g}" if "loss" in setting else f"C {setting['max_grad_norm']:g}"
    shape = ", cosine" if setting.get("schedule") == "cosine" else ""
    return f"{setting['model']}{options}, lr {setting['lr']:g}{shape}, {rest}"


def cells(rows: list[Row]) -> dict[tuple[str, str, float], list[Row]]:
    """The front's runs by (data, method, ε), in the order of their seeds."""
    found: dict[tuple[str, str, float], list[Row]] = {}
    for row in sorted((r for r in rows if r["round"] is None), key=lambda r: r["seed"]):
        found.setdefault((row["data"], row["method"], row["epsilon"]), []).append(row)
    return found


def table(rows: list[Row]) -> str:
    """Markdown: mean ± standard deviation over seeds, what was spent, and the paired difference of optimal and ISO.

    A cell with fewer seeds than the others says how many it has.
    """
    found, lines = cells(rows), []
    seeds = max((len(runs) for runs in found.values()), default=0)
    methods = [m for m in METHODS if any(key[1] == m for key in found)]
    lines.append(
        f"| data | ε (spent) | {' | '.join('ISO' if m == 'iso' else m for m in methods)} | optimal − ISO, by seed |"
    )
    lines.append("|" + "---|" * (len(methods) + 3))
    for data in dict.fromkeys(key[0] for key in found):
        for epsilon in sorted({key[2] for key in found if key[0] == data}):
            spent = max(r["spent"] for m in methods for r in found.get((data, m, epsilon), []))
            runs = [found.get((data, m, epsilon), []) for m in methods]
            entries = [_spread([100 * r["accuracy"] for r in cell], seeds) for cell in runs]
            pairs = _paired(found.get((data, "optimal", epsilon), []), found.get((data, "iso", epsilon), []))
            lines.append(
                f"| {data} | {epsilon:g} ({spent:.3f}) | {' | '.join(entries)} | {_spread(pairs, seeds, '+')} |"
            )
    return "\n".join(lines)


def settings(rows: list[Row]) -> str:
    """Markdown: what was chosen, with its held-out accuracy and the number of trials."""
    lines = ["| data | method | chosen of trials | parameters | held-out accuracy, % |", "|---|---|---|---|---|"]
    trials = [r for r in rows if r["round"] is not None]
    for data, method in dict.fromkeys((r["data"], r["method"]) for r in trials):
        mine = [r for r in trials if (r["data"], r["method"]) == (data, method)]
        best = max(mine, key=lambda r: r["accuracy"])
        name, score = "ISO" if method == "iso" else method, 100 * best["accuracy"]
        chosen = f"{words(best['setting'])} (of {len(mine)})"
        lines.append(f"| {data} | {name} | {chosen} | {best['parameters']:,} | {score:.2f} |")
    return "\n".join(lines)


def figure(rows: list[Row], path: Path) -> None:
    """Accuracy against ε, one panel per data set, bars for the standard deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = cells(rows)
    names = list(dict.fromkeys(key[0] for key in found))
    canvas, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.2), squeeze=False, layout="constrained")
    for axis, data in zip(axes[0], names, strict=True):
        for method, marker in zip(METHODS, "osv^", strict=True):
            known = [e for e in EPSILONS if (data, method, e) in found]
            points = [(e, [100 * r["accuracy"] for r in found[data, method, e]]) for e in known]
            if points:
                spreads = [statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in points]
                label = "ISO (clipping)" if method == "iso" else f"clipless, {method}"
                means = [statistics.fmean(v) for _, v in points]
                axis.errorbar(
                    [e for e, _ in points], means, spreads, marker=marker, capsize=2, label=label, lw=1.2, ms=4
                )
        axis.set(
            title=data, xlabel="ε (δ = 1e-5)", xscale="log", xticks=EPSILONS, xticklabels=[f"{e:g}" for e in EPSILONS]
        )
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("test accuracy, %")
    axes[0][0].legend(fontsize=8)
    canvas.savefig(path)


def _spread(values: list[float], seeds: int, sign: str = "") -> str:
    if not values:
        return "–"
    mean = format(statistics.fmean(values), f"{sign}.2f")
    fewer = "" if len(values) == seeds else f" (n = {len(values)})"
    return (f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean) + fewer


def _paired(a: list[Row], b: list[Row]) -> list[float]:
    other = {row["seed"]: row["accuracy"] for row in b}
    return [100 * (row["accuracy"] - other[row["seed"]]) for row in a if row["seed"] in other]
