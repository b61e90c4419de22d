"""Presets: what a paper's table holds, as data. A cell is one configuration with the paper's number beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from erlangen.training.config import TrainConfig


@dataclass(frozen=True)
class Cell:
    """One entry of a table: what is trained, and ``measure``, the public metric (or fact about the weights) reported.

    ``seed_factor`` times the preset's seeds are run where the paper's spread asks for more.
    """

    name: str
    config: TrainConfig
    paper: float | None = None
    unit: str = "test accuracy, %"
    measure: str = "test_accuracy"
    seed_factor: int = 1


@dataclass(frozen=True)
class Preset:
    """One table or figure. ``records`` is the public size of the data, so that ε is known without loading it."""

    name: str
    paper: str
    title: str
    records: int
    cells: tuple[Cell, ...]
    seeds: int = 5
    note: str = ""
    #: train all seeds and cells of this small network at once, as an ensemble
    together: bool = False

    def quick(self) -> Preset:
        """A few steps of one seed: shows that everything runs. It is no result, and says so."""
        cells = tuple(
            dataclasses.replace(cell, config=dataclasses.replace(cell.config, steps=5, evaluations=1), seed_factor=1)
            for cell in self.cells
        )
        return dataclasses.replace(self, cells=cells, seeds=1, note="QUICK: five steps, one seed; no result")

    def privacy(self) -> list[dict[str, Any]]:
        """The true (ε, δ) of every cell, without training."""
        return [cell_privacy(cell, self.records) for cell in self.cells]


def cell_privacy(cell: Cell, records: int) -> dict[str, Any]:
    from erlangen.accounting import epsilon, gaussian, noise_multiplier, poisson

    config = cell.config.settled(records)
    assert config.delta is not None
    q, sigma = config.batch / records, config.noise_multiplier
    if sigma is None:
        assert config.epsilon is not None
        sigma = noise_multiplier(config.epsilon, config.delta, q, config.steps)
    pairs = [(poisson(q, gaussian(sigma)), config.steps)]
    spent = {method: epsilon(pairs, config.delta, method) for method in ("pld", "rdp")}  # type: ignore[arg-type]
    return {
        "cell": cell.name, "epsilon": spent, "delta": config.delta, "noise_multiplier": sigma, "sample_rate": q,
        "steps": config.steps, "paper": cell.paper,
    }  # fmt: skip


_PRESETS: dict[str, Preset] = {}


def register_preset(value: Preset) -> Preset:
    _PRESETS[value.name] = value
    return value


def presets() -> list[Preset]:
    import erlangen.experiments.equivariant
    import erlangen.experiments.rep
    import erlangen.experiments.tables  # noqa: F401  (registers them)

    return [_PRESETS[name] for name in sorted(_PRESETS)]


def preset(name: str) -> Preset:
    known = {p.name: p for p in presets()}
    if name not in known:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(known)}")
    return known[name]
