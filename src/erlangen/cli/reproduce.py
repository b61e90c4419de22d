"""``erlangen reproduce``: one preset per table or figure of the papers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    name: str | None = typer.Argument(None, help="The preset; see --list."),
    list_: bool = typer.Option(False, "--list", help="Name the presets."),
    quick: bool = typer.Option(False, "--quick", help="A few steps, to see that it runs; no result."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only the privacy of each cell; nothing is trained."),
    seeds: int | None = typer.Option(None, help="Number of seeds in place of the preset's."),
    only: str | None = typer.Option(None, help="Only the cells whose name contains this."),
    out: Path | None = typer.Option(None, help="Folder for the runs. Default runs/NAME."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Reproduce a table or figure: our result beside the paper's number, at the true (ε, δ).

    The name of a table that is split by data set (eq-table3) stands for all its parts.
    """
    from erlangen.experiments import presets
    from erlangen.experiments.presets import parts

    if list_:
        rows = [
            {"name": p.name, "paper": p.paper, "title": p.title, "cells": len(p.cells), "seeds": p.seeds}
            for p in presets()
        ]
        typer.echo(
            json.dumps({"presets": rows})
            if as_json
            else "\n".join(f"{r['name']:24} {r['paper']}: {r['title']}" for r in rows)
        )
        return
    if name is None:
        raise typer.BadParameter("give the name of a preset, or --list")
    if seeds is not None and seeds < 1:
        raise typer.BadParameter(f"seeds is {seeds}; give at least one")
    chosen = [_narrowed(part, quick, only, seeds) for part in parts(name)]
    if only is not None and not any(part.cells for part in chosen):
        there = [cell.name for part in parts(name) for cell in part.cells]
        raise typer.BadParameter(f"no cell of {name} contains {only!r}; there are {there}")
    results = [_one(part, quick, dry_run, out, as_json) for part in chosen if part.cells]
    if as_json:
        typer.echo(json.dumps(results[0] if len(results) == 1 else {"preset": name, "parts": results}))


def _narrowed(part: Any, quick: bool, only: str | None, seeds: int | None) -> Any:
    part = part.quick() if quick else part
    if only is not None:
        part = dataclasses.replace(part, cells=tuple(c for c in part.cells if only.lower() in c.name.lower()))
    return part if seeds is None else dataclasses.replace(part, seeds=seeds)


def _one(part: Any, quick: bool, dry_run: bool, out: Path | None, as_json: bool) -> dict[str, Any]:
    """Run or price one preset; print it unless JSON was asked for."""
    if dry_run:
        cells = part.privacy()
        if not as_json:
            typer.echo("\n".join(map(_line, cells)))
        return {"preset": part.name, "cells": cells}
    folder = out or Path("runs") / (f"{part.name}-quick" if quick else part.name)
    folder.mkdir(parents=True, exist_ok=True)
    result = _run(part, folder, as_json)
    if not as_json:
        typer.echo(_table(result))
    return result


def _run(chosen: Any, folder: Path, quiet: bool) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from erlangen.experiments.runner import run_preset

    with Progress(console=Console(file=sys.stderr), disable=quiet) as progress:
        task = progress.add_task(chosen.name, total=len(chosen.cells) * chosen.seeds)
        return run_preset(chosen, folder, watch=lambda *_: progress.advance(task))


def _line(cell: dict[str, Any]) -> str:
    pld, rdp = (_epsilon(cell["epsilon"][method]) for method in ("pld", "rdp"))
    claim = f"  (claimed: {cell['claimed_epsilon']:g})" if cell.get("claimed_epsilon") else ""
    return (
        f"{cell['cell']:16} σ = {cell['noise_multiplier']:.4g}  q = {cell['sample_rate']:.4g}  T = {cell['steps']}  "
        f"ε = {pld} (PLD), {rdp} (RDP) at δ = {cell['delta']:.1e}{claim}"
    )


def _epsilon(value: float | str) -> str:
    return "∞" if isinstance(value, str) else f"{value:.4f}"


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['paper']}: {result['title']}"] + ([result["note"]] if result["note"] else [])
    for row in result["rows"]:
        what = f" {row['quantity']}" if "quantity" in row else ""
        number = ".4g" if "quantity" in row else ".2f"
        spread = "" if row["std"] is None else f" ± {row['std']:{number}}"
        paper = "" if row["paper"] is None else f"  paper {row['paper']}"
        lines.append(
            f"{row['cell'] + what:40} ours {row['mean']:{number}}{spread} ({row['seeds']} seeds){paper}  "
            f"ε = {_epsilon(row['epsilon']['pld'])}"
        )
        for other, gap in row.get("paired", {}).items():
            half = "" if gap["half_width_95"] is None else f" ± {gap['half_width_95']:.2f}"
            lines.append(f"{'':40} minus {other}: {gap['mean']:+.2f}{half}")
    return "\n".join(lines)
