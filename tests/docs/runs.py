"""What tests of GReDP's and GeoDP's pages share: the runs beside them, and the rows of their tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tests.docs.test_results import page
from tests.scripts import script

tables = script("gredp_geodp_tables")

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results"


@lru_cache(maxsize=8)
def measured(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / f"{name}.json").read_text())


@lru_cache(maxsize=4)
def lines(name: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in page(name).splitlines() if line.startswith("|")]


def rest(name: str, cells: Iterable[str]) -> list[str]:
    """What follows these cells in the one row of a page that begins with them."""
    first = list(cells)
    found = [line for line in lines(name) if line[: len(first)] == first]
    near = [line for line in lines(name) if line[0] == first[0]]
    assert len(found) == 1, f"{first} begins {len(found)} rows; beginning alike: {near}"
    return found[0][len(first) :]


def spread(values: Mapping[int, float], digits: int = 2) -> str:
    return f"{fmean(values.values()):.{digits}f} ± {stdev(values.values()):.{digits}f}"


def spent(name: str, task: str, setting: str, method: str, form: str = ".2f") -> str:
    """True ε, by PLD and by RDP."""
    found = measured(name)["epsilon"][f"{task} | {setting} | {method}"]
    return "∞" if "inf" in found.values() else f"{found['pld']:{form}} / {found['rdp']:{form}}"


def rate(pick: tuple[float, float, float]) -> str:
    length, bound, momentum = pick
    return f"{length / bound * (1 - momentum):.3g}"


def noise_free(name: str, task: str, seeds: int = 3) -> str:
    (values,) = tables.cells(measured(name)["runs"], f"{task}-noise-free", "test_accuracy")["σ=0", "no privacy"].values()
    assert len(values) == seeds
    return spread(values) if seeds > 1 else f"{values[0]:.1f}"


def method_page(name: str) -> str:
    return page(f"../methods/{name}")
