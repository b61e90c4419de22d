"""``erlangen train``: from data to a private model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from erlangen.training.session import Session


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    data: str | None = typer.Option(
        None, help="A data set's name, or an .npz file with x_train, y_train, x_test, y_test. Default digits."
    ),
    epsilon: float | None = typer.Option(None, help="Target ε; the noise is calibrated to it. Default 3."),
    delta: str = typer.Option("auto", help="Target δ; auto is min(1e-5, 0.1/N)."),
    noise_multiplier: float | None = typer.Option(None, help="σ, in place of --epsilon; 0 means no privacy."),
    model: str | None = typer.Option(None, help="A model's name."),
    mechanism: str | None = typer.Option(None, help="A mechanism's name."),
    clipping: str | None = typer.Option(None, help="flat, per-layer, auto-s, psac or adaptive."),
    max_grad_norm: float | None = typer.Option(None, help="The clipping bound C."),
    sampling: str | None = typer.Option(None, help="poisson, or importance (by gradient norm)."),
    selective: bool | None = typer.Option(
        None, "--selective", help="Keep an update only if a second sample's loss falls; costs a release a step."
    ),
    batch: int | None = typer.Option(None, help="Expected batch size (units of privacy)."),
    steps: int | None = typer.Option(None, help="Number of steps."),
    lr: float | None = typer.Option(None, help="Learning rate."),
    unit: str | None = typer.Option(None, help="Array of the file that names each record's patient or group."),
    seed: int | None = typer.Option(None, help="Makes the run reproducible, and therefore not fit for release."),
    secure: bool | None = typer.Option(None, "--secure", help="Noise and sampling from the system's secure generator."),
    device: str | None = typer.Option(None, help="cpu, cuda or auto."),
    out: Path | None = typer.Option(None, help="Folder of the run. Default runs/DATA-TIME."),
    resume: Path | None = typer.Option(None, help="Go on with the run in this folder."),
    physical_batch: int | None = typer.Option(None, help="Rows held in memory at once; changes no result."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a run that is in the folder."),
    config: Path | None = typer.Option(None, help="JSON file with any option of the configuration."),
    set_: list[str] = typer.Option([], "--set", help="key=value for any option of the configuration."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Train a model with differential privacy and say what was guaranteed."""
    given: dict[str, Any] = {
        "data": data, "model": model, "mechanism": mechanism, "clipping": clipping, "max_grad_norm": max_grad_norm,
        "sampling": sampling, "selective": selective,
        "batch": batch, "steps": steps, "lr": lr, "unit": unit, "seed": seed, "secure": secure, "device": device,
        "epsilon": epsilon, "noise_multiplier": noise_multiplier, "max_physical_batch": physical_batch,
    }  # fmt: skip
    values = {key: value for key, value in given.items() if value is not None}
    if resume is not None:
        summary = continue_with_progress(resume, values, quiet=as_json)
        typer.echo(json.dumps({**summary, "run": str(resume)})) if as_json else report(summary, resume)
        return
    if delta != "auto":
        values["delta"] = _float("delta", delta)
    values = {**_file(config), **values, **dict(_assignment(text) for text in set_)}
    if values.get("noise_multiplier") is not None and "epsilon" not in values:
        values["epsilon"] = None

    from erlangen.training.config import TrainConfig

    settings = TrainConfig.from_dict(values)
    folder = out or Path("runs") / f"{Path(settings.data).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    summary = run_with_progress(settings, folder, overwrite, quiet=as_json)
    if as_json:
        typer.echo(json.dumps({**summary, "run": str(folder)}))
    else:
        report(summary, folder)


def _file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import dataclasses

    from erlangen.training.config import TrainConfig

    return dataclasses.asdict(TrainConfig.from_file(path))


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} is {text!r}; give a number, or auto") from None


def _assignment(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise typer.BadParameter(f"--set {text!r} has no '='; write --set key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def run_with_progress(settings: Any, folder: Path | None, overwrite: bool, quiet: bool) -> dict[str, Any]:
    """Train with a progress bar on stderr: ε spent, images a second, time left, public test accuracy."""
    from erlangen.training.run import train as run

    with progress_bar(quiet) as watch:
        return run(settings, folder, overwrite, watch).summary


def continue_with_progress(folder: Path, changes: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from erlangen.training.run import resume as run

    with progress_bar(quiet) as watch:
        return run(folder, watch, **changes).summary


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[Session, dict[str, Any]], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), disable=quiet) as progress:
        task = progress.add_task("", total=None, note="calibrating the noise")
        first: list[tuple[float, int]] = []

        def watch(session: Session, metrics: dict[str, Any]) -> None:
            if not first:
                first.append((time.perf_counter(), session.step_count))
            seconds, steps = time.perf_counter() - first[0][0], session.step_count - first[0][1]
            note = f"{steps * session.config.batch / max(1e-9, seconds):,.0f} images/s"
            if metrics:
                note = f"ε {float(metrics['epsilon']):.2f}  " + note
                if "test_accuracy" in metrics:
                    note = f"test {metrics['test_accuracy']:.1%}  " + note
            progress.update(task, completed=session.step_count, total=session.config.steps, note=note)

        yield watch


def report(summary: dict[str, Any], folder: Path | None) -> None:
    """Accuracy and guarantee in plain words."""
    from erlangen.training.run import in_plain_words

    if summary["test"]:
        typer.echo(
            f"\nTest accuracy  {summary['test']['test_accuracy']:.1%} on {summary['data']['name']} (public test set)"
        )
    else:
        typer.echo("\nNo public test set: no accuracy is reported.")
    typer.echo(f"Privacy        {in_plain_words(summary)}")
    typer.echo(f"Randomness     {summary['randomness']}")
    if summary["steps"] < summary["planned_steps"]:
        typer.echo(
            f"Stopped        after {summary['steps']} of {summary['planned_steps']} steps: the privacy budget is spent"
        )
    if folder is not None:
        typer.echo(f"Run            {folder} (certificate.json, certificate.md, weights.safetensors)")
