"""Whole training sessions under attack: combinations of options that nobody thought of together.

A session is built twice, on neighbouring data sets: all units, and all but the last one, whose records are hostile. Both draw
every unit they have, and a `Probe` stands in for each noise source. After some steps everything that a checkpoint would keep
(weights, averages, optimizer, mechanism, companions) must be the same, bit for bit, because it may depend on a record
through noise alone; and what the probe was asked to hide may differ by what one release claims, gradient and decisions each.

Options are combined pairwise: every two values of different options stand together in some session. Mechanisms and clipping
rules come from their registries; a session that refuses a combination is no finding, a mechanism that refuses all is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erlangen.audit.flow import Draw, Probe
from erlangen.audit.threads import single_threaded
from erlangen.audit.verdict import Claim, Finding, failed, passed, unable
from erlangen.data import Dataset
from erlangen.mechanisms.clipping import clipping_rules
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

Options = Mapping[str, Any]

STEPS, BATCH, IMAGES_EACH = 2, 4, 2
#: each mechanism meets one combination in so many
STRIDE = 5
#: many equal records: whatever rounding does to one of them, it does to all
CROWD = 1500
#: rounding of a sum of few, and of many
SLACK, SLACK_OF_A_CROWD = 1e-4, 2e-3


def factors() -> dict[str, tuple[Options, ...]]:
    """Options of a session that may stand together, by what they are about."""
    return {
        "clipping": tuple({"clipping": rule} for rule in clipping_rules()),
        "companion": (
            {}, {"sampling": "importance"}, {"selective": True}, {"sampling": "importance", "selective": True},
        ),
        "parts": ({}, {"max_physical_batch": 5}, {"max_physical_batch": 5, "pad": True}),
        "update": ({}, {"optimizer": "adam", "lr": 0.01}, {"denoise": "james-stein"}),
        "strategy": ({}, {"strategy": "materialise"}, {"strategy": "norms-first"}),
        "unit": ({}, {"unit": "patient"}),
        "views": ({}, {"views": 2, "augment": "shift"}),
        "precision": ({}, {"precision": "bf16"}),
    }  # fmt: skip


@lru_cache(maxsize=4)
def _pairwise(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rows of choices in which every two values of different factors stand together, greedily few."""
    open_pairs = {
        (i, a, j, b) for i, j in combinations(range(len(sizes)), 2) for a in range(sizes[i]) for b in range(sizes[j])
    }
    rows = []
    while open_pairs:
        i, a, j, b = min(open_pairs)
        row = {i: a, j: b}
        for k in set(range(len(sizes))) - {i, j}:
            row[k] = max(range(sizes[k]), key=partial(_gain, open_pairs, row, k))
        rows.append(tuple(row[k] for k in range(len(sizes))))
        open_pairs -= {_pair(i, row[i], j, row[j]) for i, j in combinations(range(len(sizes)), 2)}
    return rows


def _gain(open_pairs: set[tuple[int, int, int, int]], row: Mapping[int, int], k: int, choice: int) -> int:
    """How many open pairs a choice for factor k closes."""
    return sum(_pair(k, choice, other, value) in open_pairs for other, value in row.items())


def _pair(i: int, a: int, j: int, b: int) -> tuple[int, int, int, int]:
    return (i, a, j, b) if i < j else (j, b, i, a)


def combined(every: Mapping[str, Sequence[Options]]) -> list[dict[str, Any]]:
    """The pairwise combinations of the factors as options of a configuration."""
    rows = _pairwise(tuple(len(values) for values in every.values()))
    chosen = ([values[k] for k, values in zip(row, every.values())] for row in rows)
    return [{key: value for part in parts for key, value in part.items()} for parts in chosen]


# --- data ------------------------------------------------------------------------------------------------------------


def hostile_images() -> Iterator[tuple[str, Tensor]]:
    """Images of every size that floating point knows."""
    image = torch.linspace(-1.0, 1.0, 64).view(1, 8, 8)
    for size in (1.0, 50.0, 1e18, 1e-42, 0.0, math.nan, math.inf):
        yield f"image times {size:g}", image * size


def records(last: Tensor, units: int) -> Dataset:
    """``units`` patients of two ordinary images each, of whom the last one's are hostile."""
    rows = units * IMAGES_EACH
    x = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    x[-IMAGES_EACH:] = last
    return _dataset(x, np.repeat(np.arange(units), IMAGES_EACH))


def crowd(units: int) -> Dataset:
    """Equal records of one label."""
    x = (30.0 + torch.linspace(0.0, 1.0, 64)).view(1, 1, 8, 8).repeat(units, 1, 1, 1)
    return _dataset(x, np.arange(units))


def _dataset(x: Tensor, owner: np.ndarray) -> Dataset:
    return Dataset("audit", x.numpy(), np.arange(len(x)) // 5 % 3, None, None, 3, owner)


def without_last(dataset: Dataset, unit: bool) -> Dataset:
    """The neighbour: one unit less."""
    rows = IMAGES_EACH if unit else 1
    owner = None if dataset.unit is None else dataset.unit[:-rows]
    return Dataset("audit", dataset.x_train[:-rows], dataset.y_train[:-rows], None, None, dataset.classes, owner)


# --- one session -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a session asked its noise to hide (gradient, decisions), and all that it keeps."""

    gradient: list[Draw]
    decisions: list[Draw]
    kept: Any


def session_of(options: Options, dataset: Dataset, kind: type[Session] = Session) -> Session:
    """A session in which every unit is drawn at every step, and nothing but `Probe`s adds noise."""
    common = {
        "epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "batch": BATCH, "steps": STEPS, "lr": 0.1, "seed": 0,
        "max_grad_norm": 0.7, "device": "cpu", "precision": "float32",
        **({"sampling_options": {"refresh": 1}} if options.get("sampling") == "importance" else {}),
        **({} if options.get("mechanism") == "clipless" else {"model_options": {"width": 8}}),
    }  # fmt: skip
    config = TrainConfig(**{**common, **_certified(options)})
    if not config.unit:
        dataset = Dataset("audit", dataset.x_train, dataset.y_train, None, None, dataset.classes)
    session = kind(config, dataset, run_id="audit session")
    _draw_everybody(session)
    session.training.mechanism.noise = Probe()
    return session


def _certified(options: Options) -> Options:
    """Bounds are certified for the precision of the products, and have to be told."""
    if options.get("mechanism") != "clipless":
        return options
    precision = {"bf16": "bf16"}.get(options.get("precision", ""), "fp32")
    return {**options, "mechanism_options": {**options.get("mechanism_options", {}), "precision": precision}}


def _draw_everybody(session: Session) -> None:
    everybody = torch.arange(session.units.count)
    rule: Any = getattr(session.sampler, "rule", None)
    if rule is not None:  # importance sampling: the weights are its own
        rule.draw = lambda norms: (everybody, (rule.max_rate / rule.probabilities(norms)).to(norms.dtype))
    else:
        session.sampler._draw = lambda step: everybody  # type: ignore[method-assign]
    if session.judge is not None:
        session.judge.selective.sampler._draw = lambda step: everybody  # type: ignore[method-assign]
        session.judge.selective.noise = Probe()


def watched(session: Session, steps: int = STEPS) -> Seen:
    for _ in range(steps):
        session.step()
    judge: Any = None if session.judge is None else session.judge.selective.noise
    probe: Any = session.training.mechanism.noise
    return Seen(probe.draws, [] if judge is None else judge.draws, session.state_dict())


def difference(a: Any, b: Any, where: str = "") -> str | None:
    """The first place where two states differ, bit for bit; None if they are the same."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if set(a) != set(b):
            return where or "its keys"
        return next((d for k in a if (d := difference(a[k], b[k], f"{where}.{k}".strip("."))) is not None), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return where
        return next(
            (d for k, (x, y) in enumerate(zip(a, b)) if (d := difference(x, y, f"{where}.{k}")) is not None), None
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return None if a.shape == b.shape and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)) else where
    return None if a == b else where


def moved(a: Sequence[Draw], b: Sequence[Draw]) -> tuple[str | None, float]:
    """(what is wrong with the noise, or None; how far apart the values of one release are, in units of their noise)."""
    if [d.value.shape for d in a] != [d.value.shape for d in b]:
        return "the number or shape of noise draws depends on the record", math.inf
    if any(not torch.equal(x.std, y.std) for x, y in zip(a, b)):
        return "the scale of the noise depends on the record", math.inf
    total: dict[int, float] = {}
    for x, y in zip(a, b):
        gap = x.value.double() - y.value.double()
        share = float(torch.where(gap == 0, 0.0, gap / x.std).square().sum())
        total[x.release] = total.get(x.release, 0.0) + (share if math.isfinite(share) else math.inf)
    return None, math.sqrt(max(total.values(), default=0.0))


class Refused(Exception):
    """This combination of options is not offered."""


def attacked(
    options: Options, dataset: Dataset, neighbour: Dataset, kind: type[Session] = Session
) -> tuple[str | None, float]:
    """(what leaks, or None; the sensitivity relative to the claim, of gradient or decisions, whichever is larger)."""
    try:
        with_record, without = (session_of(options, data, kind) for data in (dataset, neighbour))
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    claim = Claim.of(with_record.training.mechanism.event(), 1e-5)
    if claim.empty:
        return None, 0.0
    assert claim.sigma is not None
    a, b = watched(with_record), watched(without)
    for draws in (a.gradient, b.gradient):
        if len({d.release for d in draws}) != STEPS:
            return "noise is reused: a step did not open a new stream (next_release)", math.inf
    problem, gradient = moved(a.gradient, b.gradient)
    judged, decisions = moved(a.decisions, b.decisions)
    if problem or judged:
        return problem or judged, math.inf
    leak = difference(a.kept, b.kept)
    if leak is not None:
        return f"{leak}, which a checkpoint keeps, depends on the record around the noise", math.inf
    paid = with_record.judge.ratio * with_record.training.mechanism.noise_multiplier if with_record.judge else 0.0
    return None, max(gradient * claim.sigma, decisions * paid)


# --- the audit -------------------------------------------------------------------------------------------------------


def cases(index: int | None, mechanism: Options) -> Iterator[dict[str, Any]]:
    """A part of all combinations for each mechanism, so that neighbours in the registry share all of them; None is all."""
    rows = combined(factors())
    yield from ({**row, **mechanism} for row in (rows if index is None else rows[index % STRIDE :: STRIDE]))


@single_threaded
def audit_sessions(name: str, index: int | None, mechanism: Options, kind: type[Session] = Session) -> Finding:
    """One mechanism in its part of all combinations of options, and in a crowd of equal records in bfloat16."""
    images, ran, refused, worst, where = list(hostile_images()), 0, "", 0.0, ""

    def attack(label: str, options: Options, pair: Callable[[], tuple[Dataset, Dataset]], slack: float) -> str | None:
        nonlocal ran, refused, worst, where
        try:
            leak, found = attacked(options, *pair(), kind)
        except Refused as error:
            refused = str(error)
            return None
        ran += 1
        if found > worst:
            worst, where = found, label
        if leak is None and found > 1 + slack:
            leak = f"one record moves a step by {found:.5g} times the claimed sensitivity"
        return None if leak is None else f"{leak} ({label})"

    flat = {} if mechanism["mechanism"] == "clipless" else {"model": "mlp"}
    many = {**mechanism, **flat, "precision": "bf16", "batch": 64}
    problem = attack("a crowd in bf16", many, lambda: (crowd(CROWD + 1), crowd(CROWD)), SLACK_OF_A_CROWD)
    if problem:
        return failed(name, "session", problem, ran)
    for k, options in enumerate(cases(index, mechanism)):
        image, label = images[k % len(images)][1], _words(options, images[k % len(images)][0])
        data = records(image, 6)
        neighbour = without_last(data, bool(options.get("unit")))
        problem = attack(label, options, lambda d=data, n=neighbour: (d, n), SLACK)  # type: ignore[misc]
        if problem:
            return failed(name, "session", problem, ran)
    if not ran:
        return unable(name, "session", f"no combination of options could be built: {refused}")
    return passed(name, "session", ran, {"sensitivity": worst, "where": where})


#: sizes around which libraries change their kernels, one of which may round every record's gradient otherwise
CROWDS = (31, 64, 127, 256, 511, 1024, CROWD)


@single_threaded
def audit_crowds(name: str, mechanism: Options, device: str) -> Finding:
    """Crowds of equal records of many sizes on one device, in both precisions, as they come and padded to a static size."""
    worst, tried = 0.0, 0
    for units in CROWDS:
        for more in (
            {"precision": "bf16"},
            {"precision": "float32"},
            {"precision": "bf16", "pad": True, "max_physical_batch": 2048},
        ):
            for model in ("mlp", "cnn"):
                options = {**mechanism, **more, "model": model, "batch": 16, "device": device}
                leak, found = attacked(options, crowd(units + 1), crowd(units))
                tried, worst = tried + 1, max(worst, found)
                if leak is None and found > 1 + SLACK_OF_A_CROWD:
                    leak = f"one record moves a step by {found:.5g} times the claimed sensitivity"
                if leak is not None:
                    where = f"{units} equal records, {model}, {_words(more, device)}"
                    return failed(name, "session", f"{leak} ({where})", tried)
    return passed(name, "session", tried, {"sensitivity": worst})


def _words(options: Options, image: str) -> str:
    told = ", ".join(f"{k}={v}" for k, v in options.items() if k not in ("mechanism", "mechanism_options"))
    return f"{image}; {told}"


__all__ = [
    "attacked",
    "audit_sessions",
    "cases",
    "combined",
    "crowd",
    "factors",
    "hostile_images",
    "records",
    "without_last",
]
