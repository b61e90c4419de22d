"""``erlangen report``: one HTML file about one run or several, or the same figures as SVG or PDF."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    runs: list[Path] = typer.Argument(..., help="Folders of finished runs, or of a comparison."),
    out: Path | None = typer.Option(None, help="The HTML file. Default report.html in the folder of the (first) run."),
    figures: Path | None = typer.Option(None, help="Also write every figure into this folder."),
    format_: str = typer.Option("svg", "--format", help="Format of those figures: svg or pdf."),
    details: int = typer.Option(4, help="How many runs to show in detail when there are several."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Write a self-contained report that works offline: privacy in plain words, accuracy, calibration, noise, audits."""
    if details < 1:
        raise typer.BadParameter(f"details is {details}; give at least one")
    from erlangen.extras import require
    from erlangen.report.folder import collect

    require("erlangen report", "report", "plotly", "matplotlib", "jinja2")
    from erlangen.report.page import build, write
    from erlangen.report.static import FORMATS, save

    if format_ not in FORMATS:
        raise typer.BadParameter(f"format is {format_!r}; choose one of {', '.join(FORMATS)}")
    found = build(collect(runs), details)
    path = write(found, out or runs[0] / "report.html")
    drawn = save(found.figures(), figures, format_) if figures is not None else []
    if as_json:
        states = [
            {
                "run": str(r.folder), "epsilon": r.spent if r.spent < float("inf") else "inf", "delta": r.delta,
                "test_accuracy": r.accuracy, "certificate": r.certificate is not None, "problems": list(r.problems),
            }
            for r in found.runs
        ]  # fmt: skip
        names = {"report": str(path), "figures": [str(p) for p in drawn]}
        typer.echo(json.dumps({**names, "bytes": path.stat().st_size, "runs": states}))
        return
    typer.echo(f"Report   {path} ({path.stat().st_size / 1e6:.1f} MB, works offline)")
    if drawn:
        typer.echo(f"Figures  {len(drawn)} in {figures}")
    for r in found.runs:
        for problem in r.problems[:3]:
            typer.echo(f"Warning  the certificate of {r.name} does not hold: {problem}", err=True)
