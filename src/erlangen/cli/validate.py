"""``erlangen validate``: how good is the model on private records, with accounted noise."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from erlangen.accounting.words import upper


def register(app: typer.Typer) -> None:
    app.command("validate")(validate)


def validate(
    run: Path = typer.Argument(..., help="Folder of a finished run."),
    data: str = typer.Option(..., help="Private validation records: a folder of class folders, an .npz file, or a name."),
    noise_multiplier: float = typer.Option(5.0, help="σ of the counts (sensitivity 1); 0 means no privacy."),
    delta: float | None = typer.Option(None, help="δ for the reported ε; default min(1e-5, 0.1/N)."),
    single_copy: bool = typer.Option(False, "--single-copy", help="Accept a ledger whose second copy is missing."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Leave out records that cannot be read."),
    per_record: bool = typer.Option(
        False, "--per-record", help="ε of single records, also where the run protects another unit (a patient)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Release accuracy and confusion matrix on a private validation set; each call costs and is written down first."""
    from erlangen.deploy.card import ModelCard
    from erlangen.training.validate import validate as release

    result = release(run, data, noise_multiplier, delta, single_copy, skip_bad, per_record)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"Accuracy   {result['accuracy']:.1%} on {result['records']} private records (± {result['accuracy_std']:.1%} noise)"
    )
    if result["trained_on"]:
        typer.echo("           those that the run was trained on: it says little of new images; give others with --data")
    typer.echo(
        f"Privacy    ε = {_words(result['epsilon'])} at δ = {upper(result['delta'], 2, 'e')} per record, "
        f"{result['releases']} release(s) of this run so far"
    )
    if result["epsilon_if_trained_on"] != result["epsilon"]:
        why = f": {result['why_if_trained_on']}" if result["why_if_trained_on"] else ""
        typer.echo(
            f"           ε = {_words(result['epsilon_if_trained_on'])} for a record that the run was trained on, too{why}"
        )
    if result["epsilon_if_one_each"] is not None:
        typer.echo(
            f"           ε = {_words(result['epsilon_if_one_each'])} for each {result['training_protects']} to whom no more than "
            "one of these records belongs, training and validation together"
        )
    typer.echo("Confusion  (rows: actual, columns: predicted; noisy counts)")
    labels = ModelCard.read(run).labels
    width = min(20, max(map(len, labels)))
    for label, row in zip(labels, result["confusion"], strict=True):
        typer.echo(f"  {label[:width]:>{width}} " + " ".join(f"{n:5d}" for n in row))
    for note in result["ledger_notes"]:
        typer.echo(f"Ledger     was damaged and repaired: {note}")


def _words(epsilon: float | str) -> str:
    return "∞" if isinstance(epsilon, str) else upper(epsilon, 3)
