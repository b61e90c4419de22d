"""``erlangen``: the commands. Exit code 0 for success, 2 for misuse, 1 for failure; never a traceback."""

from __future__ import annotations

import os
import sys

import typer

import erlangen
from erlangen.cli import accounting, audit, reproduce, train, validate

app = typer.Typer(
    name="erlangen",
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
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


train.register(app)
reproduce.register(app)
accounting.register(app)
validate.register(app)
audit.register(app)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        print("erlangen: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ValueError, TypeError) as error:  # the user's values: configuration, data, models
        _fail(error, 2)
    except Exception as error:
        _fail(error, 130 if type(error).__name__ == "Interrupted" else 1)


def _fail(error: Exception, code: int) -> None:
    if os.environ.get("ERLANGEN_DEBUG"):
        raise error
    print(f"erlangen: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
