"""Markdown tables of what `gredp_geodp.py` measured.

    python benchmarks/gredp_geodp_tables.py frequency.json --task gredp-table1 --measure test_accuracy
    python benchmarks/gredp_geodp_tables.py frequency.json --task gredp-table1 --pairs GReDP DP-SGD "GReDP, circulant" AUTO-S

Several files count as one. A row is a method at the options that tuning chose; its differences to DP-SGD (and AUTO-S) are
means over common seeds with 95 % intervals (Student's t). ε is the method's own, by both accountants. ``--pairs`` prints one
such difference instead: that of all the pairs that are named, first minus second, taken together over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gredp_geodp import Trial, gap, tried, true_epsilons
from gredp_geodp_tasks import TASKS, Pick
from scipy.stats import t

Values = dict[int, float]
RIVALS = (("DP-SGD", "DP"), ("AUTO-S", "DP+AUTO-S"))


def cells(runs: list[dict[str, Any]], task: str, measure: str) -> dict[tuple[str, str], dict[Pick, Values]]:
    """(setting, method) → pick → seed → value; accuracies in %."""
    found: dict[tuple[str, str], dict[Pick, Values]] = {}
    for row in runs:
        trial = Trial(*row["key"])
        if trial.task == task:
            pick = (trial.length, trial.bound, trial.momentum)
            value = row[measure] * (100 if measure == "test_accuracy" else 1)
            found.setdefault((trial.setting, trial.method), {}).setdefault(pick, {})[trial.seed] = value
    return found


def chosen(result: dict[str, Any], task: str, setting: str, method: str, picks: dict[Pick, Values]) -> Pick:
    """What tuning chose; the only one where nothing was tuned."""
    found = tried(result["tuning"], TASKS[task], method, setting)
    known = {pick: score for pick, score in found.items() if pick in picks}
    return max(known, key=known.__getitem__) if known else next(iter(picks))


def difference(mine: Values, other: Values | None, digits: int) -> str:
    if not other:
        return "–"
    found = gap(mine, other)
    if found["standard_error"] is None:
        return "–" if found["mean"] is None else f"{found['mean']:+.{digits}f}"
    half = float(t.ppf(0.975, found["seeds"] - 1)) * found["standard_error"]
    return f"{found['mean']:+.{digits}f} ± {half:.{digits}f}"


def spent(epsilon: dict[str, Any]) -> str:
    return " / ".join("∞" if e == "inf" or math.isinf(float(e)) else f"{float(e):.3g}" for e in epsilon.values())


def tuned(result: dict[str, Any], task: str, measure: str) -> dict[tuple[str, str], Values]:
    """(setting, method) → seed → value, at what tuning chose; a task that extends another stands beside its methods."""
    best: dict[tuple[str, str], Values] = {}
    for name in filter(None, (TASKS[task].base, task)):
        here = cells(result["runs"], name, measure)
        best |= {key: picks[chosen(result, name, *key, picks)] for key, picks in here.items()}
    return best


def pooled(result: dict[str, Any], task: str, measure: str, names: list[str]) -> str:
    """The mean difference of pairs of methods over all settings and seeds that both have."""
    best = tuned(result, task, measure)
    unknown = sorted(set(names) - {method for _, method in best})
    if unknown or len(names) % 2:
        raise SystemExit(f"--pairs takes methods two by two; {unknown or names[-1:]} cannot be paired. There are: "
                         f"{', '.join(sorted({method for _, method in best}))}")  # fmt: skip
    one: Values = {}
    other: Values = {}
    for first, second in zip(names[::2], names[1::2], strict=True):
        for setting in [s for s, method in best if method == first and (s, second) in best]:
            for seed in sorted(best[setting, first].keys() & best[setting, second].keys()):
                place = len(one)
                one[place], other[place] = best[setting, first][seed], best[setting, second][seed]
    return f"{difference(one, other, 2 if measure == 'test_accuracy' else 3)} ({len(one)} pairs)"


def table(result: dict[str, Any], task: str, measure: str) -> str:
    found, digits = cells(result["runs"], task, measure), 2 if measure == "test_accuracy" else 3
    best = tuned(result, task, measure)
    truth = true_epsilons([row for row in result["runs"] if row["key"][0] == task])
    lines = [
        f"| setting | method | true ε (PLD / RDP) | lr | C | momentum | {measure} | − DP-SGD | − AUTO-S |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (setting, method), picks in found.items():
        best_pick = chosen(result, task, setting, method, picks)
        for pick, values in picks.items():
            length, bound, momentum = pick
            mark = "" if pick == best_pick else " (momentum 0)"
            rivals = []
            for names in RIVALS:
                theirs = [best.get((setting.replace("claimed", "true"), name)) for name in names]
                rivals.append("–" if method in names else difference(values, theirs[0] or theirs[1], digits))
            numbers = list(values.values())
            spread = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
            rate = f"{length / bound * (1 - momentum):.3g}"
            lines.append(
                f"| {setting} | {method}{mark} | {spent(truth[f'{task} | {setting} | {method}'])} | {rate} | {bound:g} | "
                f"{momentum:g} | {statistics.fmean(numbers):.{digits}f} ± {spread:.{digits}f} ({len(numbers)}) | "
                + " | ".join(rivals) + " |"
            )  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--measure", default="test_accuracy", choices=["test_accuracy", "test_loss"])
    parser.add_argument("--pairs", nargs="+", metavar="METHOD", help="first, second, first, second, …")
    arguments = parser.parse_args()
    results = [json.loads(file.read_text()) for file in arguments.files]
    merged = {phase: [row for result in results for row in result[phase]] for phase in ("tuning", "runs")}
    named = (merged, arguments.task, arguments.measure)
    print(pooled(*named, arguments.pairs) if arguments.pairs else table(*named))


if __name__ == "__main__":
    main()
