"""``erlangen ui``: a local page about a folder of runs, and a privacy calculator."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("ui")(ui)


def ui(
    runs: Path = typer.Argument(Path("runs"), help="The folder that holds the runs (looked for below it, too)."),
    port: int = typer.Option(0, help="Port; 0 takes a free one."),
    open_: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    as_json: bool = typer.Option(False, "--json", help="Print the address as one JSON object."),
) -> None:
    """Serve a read-only page on this machine: runs, comparisons, live training, a privacy calculator. Ctrl-C ends it."""
    from erlangen.cli.manners import Misuse
    from erlangen.extras import require

    if not runs.is_dir():
        raise Misuse(f"{runs} is not a folder; give the one that holds your runs (erlangen train makes runs/…)")
    if not 0 <= port < 65536:
        raise Misuse(f"port is {port}; give one from 1 to 65535, or 0 for a free one")
    require("erlangen ui", "ui", "starlette", "uvicorn", "plotly")
    from erlangen.ui.server import Server

    server = Server(runs, port)
    if as_json:
        typer.echo(json.dumps({"url": server.url, "folder": str(runs.resolve())}))
    else:
        typer.echo(f"Page     {server.url}")
        typer.echo(
            "         whoever has this address can read the runs; it works on this machine only. Ctrl-C ends it."
        )
    if open_:
        typer.launch(server.url)
    with contextlib.suppress(KeyboardInterrupt):  # the way it is meant to end
        server.run()
