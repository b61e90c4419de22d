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
    """Reproduce a table or figure: our result beside the paper's number, at the true (ε, δ)."""
    from erlangen.experiments import preset, presets

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
    chosen: Any = preset(name)
    if quick:
        chosen = chosen.quick()
    if only is not None:
        some = tuple(cell for cell in chosen.cells if only.lower() in cell.name.lower())
        if not some:
            raise typer.BadParameter(f"no cell of {name} contains {only!r}; there are {[c.name for c in chosen.cells]}")
        chosen = dataclasses.replace(chosen, cells=some)
    if seeds is not None:
        if seeds < 1:
            raise typer.BadParameter(f"seeds is {seeds}; give at least one")
        chosen = dataclasses.replace(chosen, seeds=seeds)
    if dry_run:
        cells = chosen.privacy()
        typer.echo(json.dumps({"preset": name, "cells": cells}) if as_json else "\n".join(map(_line, cells)))
        return
    folder = out or Path("runs") / (f"{name}-quick" if quick else name)
    folder.mkdir(parents=True, exist_ok=True)
    result = _run(chosen, folder, as_json)
    typer.echo(json.dumps(result) if as_json else _table(result))


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
