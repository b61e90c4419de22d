"""``erlangen prior``: weights to start from that no record has touched."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import typer

from erlangen.cli.manners import Misuse
from erlangen.cli.settings import assigned


def register(app: typer.Typer) -> None:
    app.command("prior")(prior)


def prior(
    shape: str = typer.Option(..., help="What the network sees, COLOURSxSIDExSIDE: 1x28x28, 3x32x32, …"),
    model: str = typer.Option("cnn", help="A network's name; yours with --plugin FILE. erlangen train takes cnn by itself."),
    out: Path = typer.Option(..., help="The file to write, for --weights of erlangen train."),
    steps: int | None = typer.Option(None, help="Steps of learning. Default 1000."),
    batch: int | None = typer.Option(None, help="Made-up images in a step, two views of each. Default 256."),
    images: int | None = typer.Option(None, help="Different made-up images. Default 8192."),
    seed: int = typer.Option(0, help="Decides the images and the rest; nothing here needs to be secret."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    set_: list[str] = typer.Option([], "--set", help="model_options.KEY=VALUE for the network."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file; runs that began with it no longer find it."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Learn features from made-up images: no data is read, and no privacy is spent.

    Then: erlangen train --data … --model … --weights FILE
    """
    from erlangen.prior.kept import learnt
    from erlangen.prior.learn import PriorOptions, facts_of, save_prior, square
    from erlangen.training.device import pick_device

    square(input_shape := _shape(shape))
    if out.suffix != ".safetensors":
        raise Misuse(f"out is {str(out)!r}; give a file that ends in .safetensors")
    values = assigned({}, set_)
    if strange := sorted(set(values) - {"model_options"}):
        raise Misuse(f"--set {strange[0]} is nothing that a prior depends on; give model_options.KEY=VALUE")
    given = {"steps": steps, "batch": batch, "images": images}
    options = PriorOptions(**{name: value for name, value in given.items() if value is not None}, seed=seed)
    started, place = time.perf_counter(), pick_device(device)
    model_options = values.get("model_options", {})
    _require_a_place(out, overwrite)
    network, found = learnt(model, model_options, input_shape, options, place, partial(with_bar, quiet=as_json))
    facts = facts_of(model, model_options, input_shape, options)
    save_prior(network, out, facts)
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({"weights": str(out), **facts, **found, "seconds": round(seconds, 1)}))
        return
    typer.echo(f"Wrote    {out}: {model} for images of {shape}, in {seconds:.0f} s; no data was read")
    others, loss, guessing = 2 * options.batch - 1, found["loss"], found["guessing"]
    typer.echo(f"Learnt   a view's twin is found among {others} with a loss of {loss:.2f} (guessing: {guessing:.2f})")
    typer.echo(f"Use      erlangen train --model {model} --weights {out} --data …")


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise Misuse(f"shape is {text!r}; write COLOURSxSIDExSIDE, as 1x28x28") from None


def _require_a_place(out: Path, overwrite: bool) -> None:
    """Before minutes of learning, not after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misuse(f"out is {str(out)!r}, whose folder cannot be made: {error.strerror}; choose another --out") from error
    if out.is_dir():
        raise Misuse(f"out is {str(out)!r}, which is a folder; give a file")
    if out.exists() and not overwrite:
        raise Misuse(f"out is {str(out)!r}, which is there already, and runs that began with it need it as it is; choose another "
                     "--out, or give --overwrite")  # fmt: skip
    if not os.access(out.parent, os.W_OK):
        raise Misuse(f"out is {str(out)!r}, whose folder cannot be written to; choose another --out")


def with_bar(network, input_shape, options, device: str, quiet: bool) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Learn, and show how far it is; the loss at the end, and that of guessing."""
    import math

    from erlangen.prior.learn import learn_prior
    from erlangen.terminal import COUNT, alone, bars

    losses: list[Any] = []
    with alone(), bars("learning from made-up images", COUNT, quiet=quiet) as progress:
        task = progress.add_task("", total=options.steps)

        def told(step: int, loss) -> None:  # type: ignore[no-untyped-def]
            losses[:] = [*losses[-49:], loss]
            progress.update(task, completed=step + 1)

        learn_prior(network, input_shape, options, device=device, told=told)
    return {"loss": sum(map(float, losses)) / len(losses), "guessing": math.log(2 * options.batch - 1)}
