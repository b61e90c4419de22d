"""``erlangen data``: which data sets there are and where; fetch one; look at a folder before training on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from erlangen.cli.manners import Misuse

UNIT_PATTERN: str | None = typer.Option(
    None, help="Regular expression with the owner's id in brackets, e.g. '^(p[0-9]+)_'; with a '/', matched on the path."
)
UNIT_CSV: str | None = typer.Option(None, help="Table with a column file and a column named as --unit.")
IMAGE_SIZE: str | None = typer.Option(None, help="Scale and crop images to N×N pixels (or HxW, e.g. 64x48).")
CHANNELS: str | None = typer.Option(None, help="auto, grey or rgb.")
WHITE: float | None = typer.Option(None, help="Value of a 16-bit pixel that counts as white, e.g. 4095.")
SKIP_BAD: bool = typer.Option(False, "--skip-bad", help="Leave out what cannot be read, and say so.")

app = typer.Typer(no_args_is_help=True, help="Data sets: list them, fetch one, check your own.")


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="data")


def data_options(
    unit_pattern: str | None, unit_csv: str | None, image_size: str | None, channels: str | None, white: float | None,
    skip_bad: bool, normalise: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The options that were given, as `DataOptions` takes them."""
    given: dict[str, Any] = {
        "unit_pattern": unit_pattern, "unit_csv": None if unit_csv is None else str(Path(unit_csv).resolve()),
        "image_size": None if image_size is None else _size(image_size), "channels": channels, "white": white,
        "skip_bad": skip_bad or None, "normalise": normalise,
    }  # fmt: skip
    return {key: value for key, value in given.items() if value is not None}


def _size(text: str) -> int | list[int]:
    parts = text.lower().replace("×", "x").split("x")
    if not (len(parts) in (1, 2) and all(p.strip().isdigit() for p in parts)):
        raise Misuse(f"--image-size is {text!r}; give pixels, e.g. 64, or height x width, e.g. 64x48")
    return int(parts[0]) if len(parts) == 1 else [int(p) for p in parts]


@app.command("list")
def list_(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Names that --data takes, and where each data set is on this machine."""
    from erlangen.data import datasets
    from erlangen.data.store import PUBLISHED, locate, roots

    rows = []
    for name in datasets():
        place = locate(name) if name in PUBLISHED else None
        rows.append({
            "name": name,
            "found": None if place is None else str(place),
            "download": PUBLISHED[name].size if name in PUBLISHED else None,
        })  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"datasets": rows, "looked_in": [str(r) for r in roots()]}))
        return
    for row in rows:
        made = "embedded" if row["name"] == "digits" else "made from another data set"
        where = row["found"] or (f"not here; {row['download']} to download" if row["download"] else made)
        typer.echo(f"{row['name']:<24} {where}")
    typer.echo(f"\nLooked in {' and '.join(str(r) for r in roots())}.")


@app.command("get")
def get(
    name: str = typer.Argument(..., help="A published data set, see erlangen data list."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Download a published data set into the cache; a broken transfer goes on where it stopped."""
    from erlangen.data.store import PUBLISHED, obtain

    if name not in PUBLISHED:
        raise Misuse(f"{name!r} is not a data set to download; there are {', '.join(sorted(PUBLISHED))}")
    place = obtain(name)
    typer.echo(json.dumps({"name": name, "place": str(place)}) if as_json else f"{name} is in {place}")


@app.command("check")
def check(
    source: str = typer.Argument(..., help="A folder of class folders, an .npz file, or a name."),
    unit: str | None = typer.Option(None, help="Whose privacy: an array of the file, or what --unit-pattern/--unit-csv say."),
    unit_pattern: str | None = UNIT_PATTERN,
    unit_csv: str | None = UNIT_CSV,
    image_size: str | None = IMAGE_SIZE,
    channels: str | None = CHANNELS,
    white: float | None = WHITE,
    skip_bad: bool = SKIP_BAD,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Read data as training would and say what is in it. For the owner's eyes: these counts are not private."""
    import numpy as np

    from erlangen.data import load

    data = load(source, unit, **data_options(unit_pattern, unit_csv, image_size, channels, white, skip_bad))
    names = data.class_names or tuple(str(k) for k in range(data.classes))
    counts = {part: np.bincount(y, minlength=data.classes).tolist() for part, y in _parts(data)}
    owners = None if data.unit is None else data.unit_count
    if as_json:
        typer.echo(json.dumps({
            "name": data.name, "records": len(data), "input_shape": list(data.input_shape), "class_names": list(names),
            "counts": counts, "units": owners, "notes": list(data.notes), "fingerprint": data.fingerprint(),
        }))  # fmt: skip
        return
    for note in data.notes:
        typer.echo(note)
    width = max(len(n) for n in names)
    for k, name in enumerate(names):
        typer.echo(f"  {name:<{width}}  " + "  ".join(f"{part} {count[k]}" for part, count in counts.items()))
    if owners is not None:
        typer.echo(f"{owners} {unit}(s) own {len(data)} training records")


def _parts(data: Any) -> list[tuple[str, Any]]:
    return [(part, y) for part, y in (("train", data.y_train), ("test", data.y_test)) if y is not None]
