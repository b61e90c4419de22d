"""Presets: what a paper's table holds, as data. A cell is one configuration with the paper's number beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from erlangen.accounting.words import in_json
from erlangen.spelling import hint
from erlangen.training.config import TrainConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from erlangen.experiments.measurements import Measurement

#: public facts about the papers' data: image shape and number of classes
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((1, 28, 28), 10), "fashion_mnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100), "cifar10_second_half": ((3, 32, 32), 10), "digits": ((1, 8, 8), 10),
    "rotated_mnist": ((1, 28, 28), 10), "rotated_fashion_mnist": ((1, 28, 28), 10),
    "tiny_imagenet_200": ((3, 64, 64), 200), "imagenette": ((3, 160, 160), 10),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One entry of a table: what is trained, and ``measure``, the public metric (or fact about the weights) reported.

    ``seed_factor`` times the preset's seeds are run where the paper's spread asks for more. ``claimed_epsilon`` sets
    the noise as a paper does that takes its mechanism for a plain Gaussian: the run's own ε is then another one.
    ``records`` is the size of this cell's data where a table has several. ``against`` names the cells that this one is
    compared with, seed by seed. ``curve`` also reports the measure at every evaluation, and ``paper_first`` is the paper's
    number at the first of them.
    """

    name: str
    config: TrainConfig
    paper: float | None = None
    unit: str = "test accuracy, %"
    measure: str = "test_accuracy"
    seed_factor: int = 1
    claimed_epsilon: float | None = None
    records: int | None = None
    against: tuple[str, ...] = ()
    curve: bool = False
    paper_first: float | None = None

    def resolved(self, records: int) -> TrainConfig:
        """What is trained, the noise of a claimed ε included."""
        if self.claimed_epsilon is None:
            return self.config
        config = self.config.settled(self.records or records)
        assert config.delta is not None
        rate = config.batch / (self.records or records)
        sigma = _claimed_noise(self.claimed_epsilon, config.delta, rate, config.steps)
        return dataclasses.replace(self.config, epsilon=None, noise_multiplier=sigma)


@lru_cache(maxsize=256)
def _claimed_noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """σ of a Poisson-sampled Gaussian at this ε, by RDP as the papers do."""
    from erlangen.accounting import noise_multiplier

    return noise_multiplier(epsilon, delta, rate, steps, method="rdp")


#: how much a table's prior learns (`erlangen prior`)
MADE_UP = "--steps 4000 --batch 1024 --images 131072"

#: a quick run: how many cells it looks at, its steps, records and views in a step, and what it takes of the data
QUICK_CELLS, QUICK_STEPS, QUICK_BATCH, QUICK_VIEWS, QUICK_RECORDS, QUICK_TESTS = 12, 2, 8, 2, 1000, 50

Part = TypeVar("Part")


def spread(cells: tuple[Part, ...], count: int = QUICK_CELLS) -> tuple[Part, ...]:
    """At most ``count`` of them, the first and the last included, evenly over the table."""
    if len(cells) <= count:
        return cells
    return tuple(cells[round(k * (len(cells) - 1) / (count - 1))] for k in range(count))


def _quick(config: TrainConfig) -> TrainConfig:
    """Two small steps; weights that somebody has to make first are left out."""
    batch, views = min(config.batch or QUICK_BATCH, QUICK_BATCH), min(config.views, QUICK_VIEWS)
    return dataclasses.replace(
        config, steps=QUICK_STEPS, evaluations=1, batch=batch, views=views, max_physical_batch=QUICK_BATCH * views,
        weights=None,
    )  # fmt: skip


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
    #: how many training and test records are used; all of them unless the run is a quick one
    train_records: int | None = None
    test_records: int | None = None
    #: ours, beside the paper's own tables and figures
    beside: bool = False

    def data(self) -> list[str]:
        """The data sets that it needs."""
        return sorted({cell.config.data for cell in self.cells})

    def quick(self) -> Preset:
        """A few small steps of one seed of some cells: shows that everything runs. It is no result, and says so."""
        kept = spread(self.cells)
        cells = tuple(dataclasses.replace(cell, config=_quick(cell.config), seed_factor=1) for cell in kept)
        note = (
            f"QUICK: {len(kept)} of {len(self.cells)} cells, {QUICK_STEPS} steps of small batches, one seed, {QUICK_RECORDS} "
            "records; no result"
        )
        return dataclasses.replace(self, cells=cells, seeds=1, note=note, train_records=QUICK_RECORDS, test_records=QUICK_TESTS)

    def privacy(self) -> Iterator[dict[str, Any]]:
        """The true (ε, δ) of every cell, without training, one by one: large tables take a minute."""
        return (cell_privacy(cell, self.records) for cell in self.cells)


def cell_privacy(cell: Cell, records: int) -> dict[str, Any]:
    """σ, rate, steps and the true ε by both accountants, "inf" where there is no guarantee."""
    from erlangen.accounting import epsilon, noise_multiplier

    records = cell.records or records
    config = cell.resolved(records).settled(records)
    assert config.delta is not None
    q, sigma = config.batch / records, config.noise_multiplier
    if sigma is None:
        assert config.epsilon is not None
        step = lambda s: step_event(config, s, records)  # noqa: E731
        sigma = noise_multiplier(config.epsilon, config.delta, 1.0, config.steps, make_event=step)
    pairs = [(step_event(config, sigma, records), config.steps)]
    spent = {method: epsilon(pairs, config.delta, method) for method in ("pld", "rdp")}  # type: ignore[arg-type]
    return {
        "cell": cell.name, "epsilon": {m: in_json(e) for m, e in spent.items()},
        "delta": config.delta, "noise_multiplier": sigma, "sample_rate": q, "steps": config.steps, "paper": cell.paper,
        "claimed_epsilon": cell.claimed_epsilon, "needs": needed(config),
    }  # fmt: skip


def needed(config: TrainConfig) -> str | None:
    """The file of public weights that a run reads and the command that makes it; its privacy does not depend on either."""
    weights, made = config.weights, f"{config.model}-"
    if weights is None or not weights.startswith(made):
        return weights
    source = weights.removeprefix(made)
    if source == "prior":
        options = "".join(f" --set model_options.{name}={json.dumps(value)}" for name, value in config.model_options.items())
        shape = "x".join(map(str, SHAPES[config.data][0]))
        how = f"erlangen prior --model {config.model}{options} --shape {shape} {MADE_UP} --out $ERLANGEN_DATA/{weights}.safetensors"
    else:
        data = source.replace("-", "_")
        how = f"python -m erlangen.experiments.pretrain --data {data} --model {config.model} --out $ERLANGEN_DATA"
    return f"{weights}.safetensors in $ERLANGEN_DATA, made by: {how}"


def step_event(config: TrainConfig, sigma: float, records: int) -> DpEvent:
    """All that one step releases, amplification included: the gradient, and a selective update's decision."""
    from erlangen.accounting import sequence
    from erlangen.mechanisms.companions import SelectiveUpdate
    from erlangen.training.companions import make_sampler, noise_ratio

    own = make_sampler(config, records, "").event(release_event(config, sigma))
    if not config.selective:
        return own
    batch = config.selective_options.get("batch", config.batch)
    return sequence([own, SelectiveUpdate(records, batch, noise_ratio(config) * sigma, lambda _: None).event()])


def release_event(config: TrainConfig, sigma: float) -> DpEvent:
    """One un-amplified release of the configuration's mechanism: sound forms cost σ, published ones what they say."""
    from erlangen.accounting import gaussian

    if not config.mechanism_options.get("as_published"):
        return gaussian(sigma)
    from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
    from erlangen.models import make_model

    shape, classes = SHAPES[config.data]
    model = make_model(config.model, shape, classes, **config.model_options)  # whatever the weights
    rule = make_clipping(config.clipping, config.max_grad_norm, **config.clipping_options)
    context = Context(sigma, rule, StreamNoise(0), model, config.batch, config.mechanism_options)
    mechanism = make_mechanism(config.mechanism, context)
    mechanism.bind({n: p for n, p in model.named_parameters() if p.requires_grad}, config.batch)
    return mechanism.event()


_PRESETS: dict[str, Preset | Measurement] = {}


def register_preset(value: Preset | Measurement) -> None:
    """Make a table (`Preset`) or a figure without training (`Measurement`) known by name."""
    _PRESETS[value.name] = value


def presets() -> list[Preset | Measurement]:
    import erlangen.experiments.clipless
    import erlangen.experiments.equivariant
    import erlangen.experiments.geodp
    import erlangen.experiments.gredp
    import erlangen.experiments.pretrain
    import erlangen.experiments.rep  # noqa: F401  (registers them)

    return [_PRESETS[name] for name in sorted(_PRESETS)]


def preset(name: str) -> Preset | Measurement:
    known = {p.name: p for p in presets()}
    if name not in known:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(known)}.{hint(name, known)}")
    return known[name]


def tables() -> dict[str, list[Preset | Measurement]]:
    """Every table and figure of the papers with its presets: several where it is split by data set, ours left out."""
    found: dict[str, list[Preset | Measurement]] = {}
    for each in presets():
        if not each.beside:
            found.setdefault("-".join(each.name.split("-")[:2]), []).append(each)
    return found


def parts(name: str) -> list[Preset | Measurement]:
    """The preset of this name, or the parts of a table that is split by data set: ``eq-table3`` is ``eq-table3-…``."""
    split = [p for p in presets() if p.name.startswith(f"{name}-")]
    exact = [p for p in presets() if p.name == name]
    if exact and not (split and "table" in name):
        return exact
    return exact + split or [preset(name)]
