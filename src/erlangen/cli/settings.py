"""``--set key=value``: JSON values or plain words; ``key.entry=value`` is one entry of an option that is an object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer


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
