"""Options of a configuration on the command line.

``--set key=value`` takes JSON values or plain words; ``key.entry=value`` is one entry of an option that is an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from erlangen.training.config import TrainConfig


def assignment(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise typer.BadParameter(f"--set {text!r} has no '='; write --set key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def assigned(options: Mapping[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """The options with these assignments, in order."""
    result = dict(options)
    for key, value in map(assignment, texts):
        name, dot, entry = key.partition(".")
        inside = result.get(name, {}) if dot else None
        if not dot or not isinstance(inside, dict):  # an object that is none is refused where options are checked
            result[key] = value
        else:
            result[name] = {**inside, entry: value}
    return result


def configuration(file: Path | None, given: Mapping[str, Any], texts: Sequence[str]) -> TrainConfig:
    """What was given here (``--set`` last), then what the file says, then the defaults."""
    from erlangen.training.config import TrainConfig, read_options

    values = read_options(file) if file is not None else {}
    named = given.keys() | {assignment(text)[0] for text in texts}
    if named & {"epsilon", "noise_multiplier"}:  # one given here replaces the other one of the file
        values = {key: value for key, value in values.items() if key not in ("epsilon", "noise_multiplier")}
    if "data_options" in given and isinstance(values.get("data_options"), dict):
        given = {**given, "data_options": values["data_options"] | given["data_options"]}
    return TrainConfig.from_dict(assigned({**values, **given}, texts))
