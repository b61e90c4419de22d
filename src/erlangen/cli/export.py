"""``erlangen export``: a trained model for use without this library."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from erlangen.cli.predict import AVERAGED


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    run: Path = typer.Argument(..., help="Folder of a finished run."),
    format: str = typer.Option("torch", help="torch (Python source and safetensors) or onnx."),
    out: Path | None = typer.Option(None, help="Folder (torch) or file (onnx). Default RUN/export or RUN/model.onnx."),
    average_views: bool | None = typer.Option(None, "--average-views/--single-view", help=AVERAGED),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Fold the model into plain layers, write it, and compare its outputs with the run's own."""
    from erlangen.deploy.export import export as write

    done = write(run, format, out, average_views)
    if as_json:
        typer.echo(json.dumps(done.to_json()))
        return
    typer.echo(f"Wrote    {', '.join(str(f) for f in done.files)}")
    typer.echo(f"Checked  with {done.checked_with}: outputs equal to {done.difference:.1e} (relative)")
    if done.format == "torch":
        typer.echo("Use      from model import CLASSES, load; logits = load()(images)  (model.json says what images are)")
