"""The figure of a comparison: accuracy against ε for every mechanism, with spread over seeds."""

from __future__ import annotations

from typing import Any

from erlangen.accounting.words import upper
from erlangen.report.chart import Axis, Chart, Series, floats
from erlangen.report.overview import epsilon_axis


def chart(result: dict[str, Any]) -> Chart:
    """From the result of `experiments.compare`; whiskers are ± one standard deviation over seeds."""
    series = []
    for k, mechanism in enumerate(result["mechanisms"]):
        rows = sorted((r for r in result["rows"] if r["mechanism"] == mechanism), key=lambda r: r["target_epsilon"])
        low, high = (floats([r["mean"] + sign * (r["std"] or 0.0) for r in rows]) for sign in (-1, 1))
        name = mechanism if rows[0]["model"] == result["rows"][0]["model"] else f"{mechanism} ({rows[0]['model']})"
        x, y = floats([r["target_epsilon"] for r in rows]), floats([r["mean"] for r in rows])
        series.append(Series(name, x, y, "points", low, high, f"c{k % 8}", joined=True))
    best = max(result["rows"], key=lambda r: r["mean"])
    return Chart(
        "comparison",
        f"Mechanisms on {result['data']['name']}",
        f"Mean over {result['seeds']} seeds, ± one standard deviation. {result['covers']}",
        f"Best: {best['mechanism']} with {best['mean']:.1%} at ε = {upper(best['target_epsilon'], 4)}.",
        epsilon_axis(min(result["epsilons"]), max(result["epsilons"])),
        Axis("accuracy on the public test set", percent=True),
        tuple(series),
        height=400,
    )
