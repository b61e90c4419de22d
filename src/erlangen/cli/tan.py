"""``erlangen tan``: predict a large-batch private run from a small one."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("tan")(tan)


def tan(
    k: float = typer.Option(8.0, "-k", help="Divide the batch and the noise multiplier by this."),
    seeds: int = typer.Option(3, help="Small runs, one for each of the seeds 0, 1, …"),
    config: Path | None = typer.Option(None, help="JSON file with the options of the large run."),
    set_: list[str] = typer.Option([], "--set", help="key=value for any option of the large run."),
    out: Path | None = typer.Option(None, help="Folder for the small runs, their ledgers and tan.json."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Dry run: predict the accuracy of a large-batch private run at 1/k of its work. The dry run itself is NOT private."""
    from erlangen.accounting.words import upper
    from erlangen.cli.settings import configuration
    from erlangen.training.tan import SAFE, dry_run

    settings = configuration(config, {}, set_)
    shown = (lambda seed, accuracy: None) if as_json else (lambda s, a: typer.echo(f"  seed {s}: {a:.2%}", err=True))
    result = dry_run(settings, k, range(seeds), out, shown)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
        return
    plan = result.plan
    typer.echo(f"Predicted     {result.mean:.1%} ± {result.spread:.1%} ({_runs(len(result.accuracies))})")
    typer.echo(f"Large run     batch {plan.target.batch:g}, {plan.target.steps} steps: ε = {upper(plan.target_epsilon, 3)}")
    typer.echo(f"Small runs    batch {plan.small.batch:g}, σ = {plan.small.noise_multiplier:.3g}, {1 / k:.1%} of the work")
    typer.echo(f"Dominance     {plan.dominance:.3g} (at least; noise over the small runs' sampling error, {SAFE:g} is enough)")
    for remark in plan.remarks:
        typer.echo(f"Note          {remark}")


def _runs(count: int) -> str:
    return "one small run: no spread is known" if count == 1 else f"{count} small runs"
