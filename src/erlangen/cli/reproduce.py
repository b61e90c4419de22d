"""``erlangen reproduce``: one preset per table or figure of the papers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import typer

#: options that say how a cell is trained, not what
HOW = ("device", "pad", "graph", "compile", "max_physical_batch", "evaluations", "checkpoints", "non_private")
KEYS = ", ".join(HOW)


def register(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    name: str | None = typer.Argument(None, help="The preset; see --list."),
    list_: bool = typer.Option(False, "--list", help="Name the presets."),
    quick: bool = typer.Option(False, "--quick", help="A few steps, to see that it runs; no result."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only the privacy of each cell; nothing is trained."),
    seeds: int | None = typer.Option(None, help="Number of seeds in place of the preset's."),
    first_seed: int = typer.Option(0, min=0, help="The first seed, so that a table can be made in several places."),
    only: str | None = typer.Option(None, help="Only the cells whose name contains this."),
    out: Path | None = typer.Option(None, help="Folder for the runs. Default runs/NAME."),
    jobs: int = typer.Option(1, min=1, help="Runs trained side by side, each in a process; they share a GPU."),
    set_: list[str] = typer.Option([], "--set", help=f"key=value for what changes no result: {KEYS}."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Reproduce a table or figure: our result beside the paper's number, at the true (ε, δ).

    The name of a table that is split by data set (eq-table3) stands for all its parts.
    """
    from erlangen.experiments.presets import parts

    if list_:
        typer.echo(json.dumps(_listed()) if as_json else _list_text(_listed()))
        return
    if name is None:
        raise typer.BadParameter("give the name of a preset, or --list")
    if seeds is not None and seeds < 1:
        raise typer.BadParameter(f"seeds is {seeds}; give at least one")
    if quick and jobs > 1:
        raise typer.BadParameter("--quick runs in one process: leave --jobs out")
    chosen = [_narrowed(part, quick, only, seeds) for part in parts(name)]
    chosen = [_changed(part, set_) for part in chosen] if set_ else chosen
    if only is not None and not any(part.cells for part in chosen):
        there = [cell.name for part in parts(name) for cell in part.cells]
        raise typer.BadParameter(f"no cell of {name} contains {only!r}; there are {there}")
    asked = [part for part in chosen if part.cells]
    apart = out is not None and len(parts(name)) > 1  # parts have cells of the same name
    results = [_one(p, quick, dry_run, out / p.name if out and apart else out, as_json, jobs, first_seed) for p in asked]
    if as_json:
        typer.echo(json.dumps(results[0] if len(results) == 1 else {"preset": name, "parts": results}))


def _listed() -> dict[str, Any]:
    """One entry for every table and figure of the papers; what is ours stands beside them."""
    from erlangen.experiments.presets import presets, tables

    def row(name: str, members: list[Any]) -> dict[str, Any]:
        first = members[0]
        return {
            "name": name, "paper": first.paper if len(members) == 1 else first.paper.split(",")[0].rstrip(")") + ")",
            "title": first.title if len(members) == 1 else f"in {len(members)} parts, one for each data set",
            "cells": sum(len(p.cells) for p in members), "seeds": first.seeds,
            "data": sorted({d for p in members for d in p.data()}), "parts": [p.name for p in members],
        }  # fmt: skip

    return {
        "presets": [row(name, members) for name, members in tables().items()],
        "beside": [row(p.name, [p]) for p in presets() if p.beside],
    }


def _list_text(listed: dict[str, Any]) -> str:
    from erlangen.experiments.presets import preset

    lines = []
    for heading, rows in (("", listed["presets"]), ("Ours, beside the papers' tables and figures:", listed["beside"])):
        lines += ["", heading] if heading else []
        for r in rows:
            lines.append(f"{r['name']:22} {r['paper']}: {r['title']}")
            lines += [f"  {part:20} {preset(part).title}" for part in r["parts"] if len(r["parts"]) > 1]
    return "\n".join(lines)


def _narrowed(part: Any, quick: bool, only: str | None, seeds: int | None) -> Any:
    if only is not None:
        part = dataclasses.replace(part, cells=tuple(c for c in part.cells if only.lower() in c.name.lower()))
    part = part.quick() if quick else part
    return part if seeds is None else dataclasses.replace(part, seeds=seeds)


def _changed(part: Any, assignments: list[str]) -> Any:
    """The cells with other options of `HOW`."""
    from erlangen.cli.settings import assigned

    changes = assigned({}, assignments)
    refused = sorted(set(changes) - set(HOW))
    if refused:
        raise typer.BadParameter(f"{', '.join(refused)} would make another table; --set takes {KEYS}")
    if not hasattr(part, "together"):
        raise typer.BadParameter(f"{part.name} measures and trains nothing: leave --set out")
    changed = (dataclasses.replace(c, config=dataclasses.replace(c.config, **changes)) for c in part.cells)
    return dataclasses.replace(part, cells=tuple(changed))


def _one(part: Any, quick: bool, dry_run: bool, out: Path | None, as_json: bool, jobs: int = 1, first: int = 0) -> dict[str, Any]:
    """Run or price one preset; print it unless JSON was asked for."""
    from erlangen.training.run import Interrupted

    if dry_run:
        cells = []
        if not as_json:  # parts have cells of the same name
            typer.echo(f"{part.paper}: {part.title}")
        width = max(len(cell.name) for cell in part.cells)
        for cell in part.privacy():
            cells.append(cell)
            if not as_json:
                typer.echo(_line(cell, width))
        if not as_json:
            for file in sorted({cell["needs"] for cell in cells if cell.get("needs")}):
                typer.echo(f"A run needs {file}")
        return {"preset": part.name, "cells": cells}
    folder = out or Path("runs") / (f"{part.name}-quick" if quick else part.name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = _first_look(part, folder, as_json, first) if quick else _run(part, folder, as_json, jobs, first)
    except (KeyboardInterrupt, Interrupted):
        typer.echo(f"What is finished is kept in {folder}; the same command goes on from there.", err=True)
        raise KeyboardInterrupt from None
    if not as_json:
        typer.echo(_table(result))
    return result


def _run(chosen: Any, folder: Path, quiet: bool, jobs: int = 1, first: int = 0) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from erlangen.experiments.runner import run_preset

    with Progress(console=Console(file=sys.stderr), disable=quiet) as progress:
        task = progress.add_task(chosen.name, total=sum(getattr(c, "seed_factor", 1) for c in chosen.cells) * chosen.seeds)
        return run_preset(chosen, folder, first, watch=lambda *_: progress.advance(task), workers=jobs)


def _first_look(chosen: Any, folder: Path, quiet: bool, first: int) -> dict[str, Any]:
    """A quick run, on made-up images where the data is not at hand; the result says both."""
    from erlangen.experiments.quick import said, stand_ins

    with stand_ins() as used:
        result = _run(chosen, folder, quiet, first=first)
    result["quick"], result["stand_ins"] = True, sorted(used)
    result["note"] = ". ".join(filter(None, (result["note"], said(used))))
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _line(cell: dict[str, Any], width: int) -> str:
    pld, rdp = (_epsilon(cell["epsilon"][method]) for method in ("pld", "rdp"))
    claim = f"  (claimed: {cell['claimed_epsilon']:g})" if cell.get("claimed_epsilon") else ""
    return (
        f"{cell['cell']:{width}}  σ = {cell['noise_multiplier']:.4g}  q = {cell['sample_rate']:.4g}  T = {cell['steps']}  "
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
        if row.get("curve"):
            first = row["curve"][0]
            theirs = "" if row["paper_first"] is None else f", paper {row['paper_first']} when it begins"
            lines.append(f"{'':40} step {first['step']}, ε = {_epsilon(first['epsilon'])}: {first['mean']:.2f}{theirs}")
        for other, gap in row.get("paired", {}).items():
            half = "" if gap["half_width_95"] is None else f" ± {gap['half_width_95']:.2f}"
            lines.append(f"{'':40} minus {other}: {gap['mean']:+.2f}{half}")
    return "\n".join(lines)
