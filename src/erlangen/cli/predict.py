"""``erlangen predict``: classes and probabilities for new images."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from erlangen.cli.manners import Misuse

AVERAGED = "Average answers over the views that the network was trained on, or not. Default: as the run was told."


def register(app: typer.Typer) -> None:
    app.command("predict")(predict)


def predict(
    run: Path = typer.Argument(..., help="Folder of a finished run."),
    inputs: list[Path] = typer.Argument(..., help="Image files, folders of images, .npz or .npy files."),
    out: Path | None = typer.Option(None, help="Write to this file: .csv or .json. Default: a CSV table on stdout."),
    resize: bool = typer.Option(False, "--resize", help="Scale and crop images of another size."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Leave out what cannot be read, and say so."),
    key: str | None = typer.Option(None, help="The array of an .npz file that holds the images."),
    average_views: bool | None = typer.Option(None, "--average-views/--single-view", help=AVERAGED),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:N or auto."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Predict with a trained model. Predictions are post-processing: they cost no privacy, however many."""
    from erlangen.data.images import named
    from erlangen.deploy.card import load_run
    from erlangen.deploy.predict import predict as answers

    if out is not None and out.suffix not in (".csv", ".json"):
        raise Misuse(f"--out is {str(out)!r}; give a file that ends in .csv or .json")
    model, card = load_run(run, average_views)
    with _counting() as told:
        found = answers(model, card, inputs, resize=resize, skip_bad=skip_bad, key=key, device=device, told=told)
    for name, why in found.skipped:
        typer.echo(f"erlangen: note: left out {name}: {why}", err=True)
    if found.aside:
        typer.echo(f"erlangen: note: left aside, no images: {named(list(found.aside))}", err=True)
    if out is not None:
        _write(out, json.dumps(found.to_json(), indent=2) + "\n" if out.suffix == ".json" else _csv(found))
        done = {"out": str(out), "predictions": len(found.rows), "skipped": len(found.skipped)}
        typer.echo(json.dumps(done) if as_json else f"{len(found.rows)} predictions in {out}")
    else:
        typer.echo(json.dumps(found.to_json()) if as_json else _csv(found), nl=as_json)


@contextmanager
def _counting() -> Iterator[Callable[[int], None]]:
    """How far it is, on a terminal."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda count: None
        return
    with console.status("predicting") as status:
        yield lambda count: status.update(f"predicting: {count:,} images")


def _csv(found: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(found.table())
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
