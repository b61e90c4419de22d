"""``erlangen compare``: mechanisms side by side at the same true ε, with the same tuning effort."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from erlangen.cli.data import CHANNELS, IMAGE_SIZE, SKIP_BAD, UNIT_CSV, UNIT_PATTERN, WHITE, data_options
from erlangen.cli.settings import assigned

#: the networks that Clipless can train are not those of the others
LIPSCHITZ = "lipschitz-mlp"


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    data: str = typer.Option("digits", help="A data set's name or the path of your own; it needs a public test set."),
    epsilon: str = typer.Option("1,2,4,8", help="Target ε, separated by commas."),
    mechanism: str = typer.Option(
        "iso,rep,geodp,spectral,clipless", help="Mechanisms; differences are from the first."
    ),
    seeds: int = typer.Option(5, help="Runs of each cell."),
    trials: int = typer.Option(6, help="Tuning trials of each cell on held-out training records; 0: no tuning."),
    accounted: bool = typer.Option(False, "--accounted", help="Let ε cover the tuning (repeat and select)."),
    held_out: float = typer.Option(0.2, help="Share of the training records held out for tuning."),
    model: str = typer.Option("cnn", help="The network."),
    model_for: list[str] = typer.Option(
        [], help="MECHANISM=NETWORK where it differs. Default clipless=lipschitz-mlp."
    ),
    unit: str | None = typer.Option(None, help="What names each record's patient or group."),
    unit_pattern: str | None = UNIT_PATTERN,
    unit_csv: str | None = UNIT_CSV,
    image_size: str | None = IMAGE_SIZE,
    channels: str | None = CHANNELS,
    white: float | None = WHITE,
    skip_bad: bool = SKIP_BAD,
    steps: int | None = typer.Option(None, help="Number of steps."),
    batch: int | None = typer.Option(None, help="Expected batch size (units of privacy)."),
    device: str | None = typer.Option(None, help="auto (default), cpu, cuda or cuda:N."),
    set_: list[str] = typer.Option([], "--set", help="key=value for any option of the configuration."),
    jobs: int | None = typer.Option(None, help="Processes. Default: one per core, or one where there is a GPU."),
    threads: int = typer.Option(1, help="Threads of each process."),
    cluster: bool = typer.Option(False, "--cluster", help="Run on the Ray cluster that was started by `ray start`."),
    out: Path | None = typer.Option(None, help="Folder. Default runs/compare-DATA. Finished work in it is kept."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Compare mechanisms at equal true ε: one table, one figure, paired intervals over seeds. Resumable."""
    from erlangen.experiments.compare import Comparison
    from erlangen.experiments.compare import compare as run
    from erlangen.experiments.pool import Pool, default_workers, require_ray
    from erlangen.training.config import TrainConfig

    if cluster:
        require_ray()
    names = _list(mechanism)
    given = {"data": data, "model": model, "unit": unit, "steps": steps, "batch": batch, "device": device}
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    values["data_options"] = data_options(unit_pattern, unit_csv, image_size, channels, white, skip_bad)
    base = TrainConfig.from_dict(assigned(values, set_))
    spec = Comparison(
        base, tuple(names), tuple(_numbers(epsilon)), seeds, trials, held_out, accounted, _models(model_for, base.model, names)
    )  # fmt: skip
    if jobs is not None and jobs < 1:
        raise typer.BadParameter(f"jobs is {jobs}; give at least one process")
    pool = Pool(
        jobs or default_workers(threads), threads, "auto" if cluster else None, 1.0 if base.device == "cuda" else 0.0
    )
    folder = out or Path("runs") / f"compare-{Path(data).stem}"
    try:
        with _progress(as_json) as watch:
            result = run(spec, folder, pool, watch)
    except KeyboardInterrupt:
        typer.echo(f"What is finished is kept in {folder}; the same command goes on from there.", err=True)
        raise
    left = leave(result, folder)
    if as_json:
        typer.echo(json.dumps({**result, "out": str(folder), "files": left}))
    else:
        typer.echo((folder / "table.txt").read_text())
        typer.echo(f"Files     {', '.join(left)} in {folder}")
        if result["runs"]:
            typer.echo(f"Report    erlangen report {folder}")


def leave(result: dict[str, Any], folder: Path) -> list[str]:
    """The table as text, Markdown and CSV, and the figure as SVG and PDF where matplotlib is installed."""
    from importlib.util import find_spec

    from erlangen.experiments import comparison_table as table

    files = {
        "table.txt": table.text(result),
        "table.md": table.markdown(result),
        "table.csv": table.comma_separated(result),
    }
    for name, content in files.items():
        (folder / name).write_text(content + ("" if content.endswith("\n") else "\n"))
    drawn = []
    if find_spec("matplotlib") is not None:
        from erlangen.report.comparison import chart
        from erlangen.report.static import draw

        for form in ("svg", "pdf"):
            draw(chart(result), folder / f"figure.{form}")
            drawn.append(f"figure.{form}")
    return [*files, *drawn, "comparison.json"]


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in _list(text)]
    except ValueError:
        raise typer.BadParameter(f"epsilon is {text!r}; give numbers separated by commas, such as 1,2,4,8") from None


def _models(given: list[str], base: str, mechanisms: list[str]) -> dict[str, str]:
    models = {} if base.startswith("lipschitz") or "clipless" not in mechanisms else {"clipless": LIPSCHITZ}
    for text in given:
        name, sign, network = text.partition("=")
        if not sign or name not in mechanisms:
            raise typer.BadParameter(
                f"model-for is {text!r}; write MECHANISM=NETWORK with one of {', '.join(mechanisms)}"
            )
        models[name] = network
    return models


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    from erlangen.terminal import COUNT, bars

    with bars("{task.description}", COUNT, quiet=quiet) as progress:
        tasks: dict[str, Any] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield watch
