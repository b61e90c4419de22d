"""Code of the user's own that registers mechanisms, clipping rules, layer rules or networks, for the commands.

A plugin is a file or a module that is imported once, before a command does anything, so that what it registers is known by
name. Plugins are named by `VARIABLE`, which child processes inherit; by ``--plugin``, which extends it; or by an installed package:
``[project.entry-points."erlangen.plugins"]``. A run's folder never names one: to open somebody else's folder runs nobody's code.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

GROUP, VARIABLE = "erlangen.plugins", "ERLANGEN_PLUGINS"

_loaded: set[str] = set()


class PluginError(ValueError):
    """A plugin that is not there, or fails when it is imported."""


def named() -> list[str]:
    """The files and modules of `VARIABLE`."""
    return [word for word in map(str.strip, os.environ.get(VARIABLE, "").split(",")) if word]


def add(plugins: Iterable[str]) -> None:
    """Name more of them, for this process and its children, wherever they start."""
    more = [str(Path(word).resolve()) if word.endswith(".py") else word for word in plugins]
    if more:
        os.environ[VARIABLE] = ",".join([*named(), *more])


def load(more: Iterable[str] = ()) -> None:
    """Import what is installed or named, and these, each once."""
    for point in entry_points(group=GROUP):
        _once(f"{point.name} ({point.value})", point.load)
    for word in [*named(), *more]:
        _once(word, partial(_file, Path(word)) if word.endswith(".py") else partial(importlib.import_module, word))


def _once(what: str, importing: Callable[[], object]) -> None:
    if what in _loaded:
        return
    try:
        importing()
    except PluginError:
        raise
    except Exception as error:  # whatever the user's code does when it is imported
        if os.environ.get("ERLANGEN_DEBUG"):
            raise
        cure = "" if what.endswith(".py") else "; put its folder on PYTHONPATH, or give the path of its file"
        raise PluginError(f"plugin {what} cannot be imported: {type(error).__name__}: {error}{cure}") from error
    _loaded.add(what)


def _file(path: Path) -> None:
    if not path.is_file():
        raise PluginError(f"plugin is {str(path)!r}, where there is no file; give the path of a Python file or a module's name")
    name = f"erlangen_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
