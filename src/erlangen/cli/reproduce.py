"""``erlangen reproduce``: one preset per table or figure of the papers."""

from __future__ import annotations

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
    chosen = preset(name)
    if quick:
        chosen = chosen.quick()
    if seeds is not None:
        import dataclasses

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
    spent = cell["epsilon"]
    return (
        f"{cell['cell']:16} σ = {cell['noise_multiplier']:.4g}  q = {cell['sample_rate']:.4g}  T = {cell['steps']}  "
        f"ε = {spent['pld']:.4f} (PLD), {spent['rdp']:.4f} (RDP) at δ = {cell['delta']:.1e}"
    )


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['paper']}: {result['title']}"] + ([result["note"]] if result["note"] else [])
    for row in result["rows"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
        epsilon = row["epsilon"]["pld"]
        epsilon = epsilon if isinstance(epsilon, str) else f"{epsilon:.3f}"
        lines.append(
            f"{row['cell']:16} ours {row['mean']:.2f}{spread} ({row['seeds']} seeds)  paper {row['paper']}  ε = {epsilon}"
        )
    return "\n".join(lines)
