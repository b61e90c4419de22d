"""``erlangen``: the commands. How they end is in `manners`."""

from __future__ import annotations

import os

import typer

import erlangen
from erlangen import plugins
from erlangen.cli import (
    accounting,
    audit,
    compare,
    data,
    export,
    predict,
    prior,
    report,
    reproduce,
    sensitivity,
    tan,
    train,
    ui,
    validate,
)
from erlangen.cli.manners import Misuse, Polite

#: commands that train or release: every one of several processes would do it for itself
ALONE = ("reproduce", "validate", "compare", "tan")

app = typer.Typer(
    name="erlangen",
    cls=Polite,
    help="Geometry-aware differentially private deep learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"erlangen {erlangen.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    plugin: list[str] = typer.Option(
        [], help="A Python file or module that registers mechanisms, layers or networks of your own; may stand after the command."
    ),
) -> None:
    count, command = os.environ.get("WORLD_SIZE", "1"), context.invoked_subcommand
    if command in ALONE and count != "1":
        raise Misuse(
            f"WORLD_SIZE is {count}, and {command} is for one process: each would do all of it, and spend privacy, for itself. "
            "Start it without torchrun, which shares the work of erlangen train alone, or unset WORLD_SIZE"
        )
    plugins.add(plugin)
    plugins.load()


train.register(app)
reproduce.register(app)
accounting.register(app)
validate.register(app)
audit.register(app)
sensitivity.register(app)
report.register(app)
compare.register(app)
predict.register(app)
export.register(app)
data.register(app)
tan.register(app)
prior.register(app)
ui.register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
