"""``erlangen audit sensitivity``: an adversary tries to beat the certified bounds of training without clipping."""

from __future__ import annotations

import json
from typing import Any

import typer

from erlangen.cli.audit import EXIT, JSON, SEED, bar
from erlangen.cli.audit import app as audit


def register(root: typer.Typer) -> None:
    """Add the command to those of ``erlangen audit``."""
    audit.command("sensitivity")(sensitivity)


def sensitivity(
    mechanism: str = typer.Argument("clipless", help="A mechanism with certified sensitivities: clipless."),
    full: bool = typer.Option(False, "--full", help="The networks at full size (minutes), not narrow twins."),
    train_steps: int = typer.Option(500, help="Noisy, projected steps before the search."),
    networks: str | None = typer.Option(None, help="Some of lenet,vgg,resnet,mixer. Default all."),
    workers: int = typer.Option(1, help="Processes: a network each."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> None:
    """Search every layer, loss and trained network for a record whose gradient exceeds its certified bound."""
    from erlangen.audit.sensitivity import audit_sensitivity

    if mechanism != "clipless":
        raise typer.BadParameter(
            f"mechanism is {mechanism!r}; only 'clipless' certifies sensitivities instead of clipping"
        )
    if train_steps < 0:
        raise typer.BadParameter(f"train-steps is {train_steps}; give a number ≥ 0")
    if workers < 1:
        raise typer.BadParameter(f"workers is {workers}; give at least one process")
    names = None if networks is None else [n.strip() for n in networks.split(",") if n.strip()]
    with bar("searching for a gradient above its bound", as_json) as tick:
        try:
            result = audit_sensitivity(full, train_steps, names, seed, tick, workers=workers)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    typer.echo(json.dumps(result, allow_nan=False) if as_json else _words(result))
    raise typer.Exit(EXIT[result["verdict"]])


def _words(result: dict[str, Any]) -> str:
    lines = [f"{'subject':24} found/certified"]
    for row in (*result["layers"], *result["losses"], *result["networks"]):
        lines.append(f"{row['subject']:24} {row['error'] or format(row['worst'], '.4f')}")
    lines.append(f"{'control (wrong bound)':24} {'refuted' if result['control']['refuted'] else 'NOT refuted'}")
    lines.append(f"bounds reached to 90 %: {', '.join(result['tight_layers'])}")
    return "\n".join([*lines, f"verdict: {result['verdict']}"])
