"""What the long benchmarks share: a result file that is always whole, trials that are made once, and an end in time.

    class Table(Bench[Cell]):                          # a cell says what it is (`given`) and what it trains with (`family`)
        def train(self, phase, trials): ...            # the scores of some cells of one family
        def work(self):
            self.run("tuning", [...])                  # what the file does not have yet, an ensemble at a time
            self.run("runs", [...])                    # of what is best in self.results.rows("tuning")

    Table(options, resume=True).main()

Every ensemble is written as it ends. None is begun after the budget; the same command with the same file goes on.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from erlangen.atomic import write_atomically
from erlangen.data import Dataset
from erlangen.training.config import TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.ensemble import Ensemble

Row = dict[str, Any]


class Trial(Protocol):
    @property
    def given(self) -> Row:
        """What its row says before it is trained: the fields it is known by, and options that go with them."""

    @property
    def family(self) -> str:
        """Trials of one family train together."""


T = TypeVar("T", bound=Trial)


class OutOfTime(Exception):
    """The budget is spent; what is finished is in the file."""


class Budget:
    """Seconds from now on."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        return self.end - time.perf_counter()

    def check(self) -> None:
        if self.left() < 0:
            raise OutOfTime


# -- the file -------------------------------------------------------------------------------------------------------


def named(row: Mapping[str, Any], fields: Iterable[str]) -> str:
    """A row's name: the fields that it is known by, whatever their order inside."""
    return json.dumps([row[field] for field in fields], sort_keys=True)


class Results:
    """A JSON file of rows in named phases, and whatever else a script writes into ``content``.

    ``phases`` says by which fields a row of each is known. Guaranteed: on disk is the state before a write or the one after
    it, never a part; a trial that has a row is not left to do; a row or a file that was made with other options is an error
    and is not mixed with. ``summary`` is computed of the content and written beside it, at every write.
    """

    def __init__(
        self, path: Path, phases: Mapping[str, Sequence[str]], resume: bool = True,
        summary: Callable[[Row], Row] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.phases, self.summary = path, phases, summary
        self.content: Row = json.loads(path.read_text()) if resume and path.exists() else {}
        self._known: dict[str, dict[str, Row]] = {}
        for phase, fields in phases.items():
            self._known[phase] = {named(row, fields): row for row in self.content.setdefault(phase, [])}
        self.before, self.started = self.content.get("seconds", 0.0), time.perf_counter()

    def rows(self, phase: str) -> list[Row]:
        return self.content[phase]

    def find(self, phase: str, given: Row) -> Row | None:
        """The row of that name, if it is there and has what is given."""
        name = named(given, self.phases[phase])
        row = self._known[phase].get(name)
        if row is not None:
            for field in [f for f in given if f in row and row[f] != given[f]]:
                self._refuse(f"{name} in {phase}", field, row[field], given[field])
        return row

    def left(self, phase: str, trials: Iterable[T]) -> list[T]:
        return [trial for trial in trials if self.find(phase, trial.given) is None]

    def hold(self, conditions: Row, unsaid: Row) -> None:
        """Write down what all rows are made with; an error, where rows were made with something else.

        ``unsaid``: what a file that does not say so was made with.
        """
        known = self.content.setdefault("conditions", {})
        for name, value in json.loads(json.dumps(conditions)).items():
            before = known.get(name, unsaid.get(name, value))
            if before != value and any(self._known.values()):
                self._refuse("rows", name, before, value)
            known[name] = value

    def _refuse(self, what: str, name: str, before: Any, now: Any) -> None:
        raise SystemExit(
            f"{self.path} has {what} with {name} = {before!r}, and now it is {now!r}: the two would be mixed. "
            f"Give {name} as before, or another file"
        )

    def keep(self, phase: str, rows: Iterable[Row], **version: str) -> None:
        """Add rows and write the file; ``version`` says what made them."""
        for row in rows:
            self.content[phase].append(row)
            self._known[phase][named(row, self.phases[phase])] = row
        versions = self.content.setdefault("versions", []) if version else []
        if version not in versions:
            versions.append(version)
        self.save()

    def save(self) -> None:
        self.content["seconds"] = self.before + time.perf_counter() - self.started
        if self.summary is not None:
            self.content |= self.summary(self.content)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps(self.content, indent=1) + "\n").encode())


# -- the work -------------------------------------------------------------------------------------------------------


class Bench(ABC, Generic[T]):
    """Trials in phases: each is trained once, in ensembles of its family, while there is time."""

    phases: ClassVar[Mapping[str, Sequence[str]]] = {"tuning": ("key",), "runs": ("key",)}
    again = "run again with --resume"

    def __init__(self, options: argparse.Namespace, resume: bool) -> None:
        self.options, self.budget = options, Budget(options.budget)
        os.environ["ERLANGEN_DATA"] = str(options.data)
        self.results = Results(options.out, self.phases, resume, self.summary)
        self.graph = not options.no_graph

    @abstractmethod
    def train(self, phase: str, trials: list[T]) -> list[Row]:
        """The scores of some trials of one family."""

    @abstractmethod
    def work(self) -> None:
        """All phases, in their order."""

    def summary(self, content: Row) -> Row:
        return {}

    def members(self, trial: T) -> int:
        """How many trials like this one train at once."""
        return self.options.members

    def where(self) -> str:
        device = pick_device(self.options.device)
        return torch.cuda.get_device_name() if device.startswith("cuda") else device

    def run(self, phase: str, trials: Iterable[T]) -> None:
        """Train what is not in the file, and write it down ensemble by ensemble."""
        families: dict[str, list[T]] = {}
        for trial in self.results.left(phase, trials):
            families.setdefault(trial.family, []).append(trial)
        for family, members in families.items():
            for part in batched(members, self.members(members[0])):
                self.budget.check()
                started = time.perf_counter()
                self.keep(phase, part, self.train(phase, part))
                gc.collect()  # memory comes back before the next ensemble asks for it
                print(f"{phase} {family}: {len(part)} runs in {time.perf_counter() - started:.1f} s", flush=True)

    def keep(self, phase: str, trials: Sequence[T], scores: Sequence[Row]) -> None:
        rows = [{**trial.given, **score} for trial, score in zip(trials, scores, strict=True)]
        self.results.keep(phase, rows, torch=torch.__version__, device=self.where())

    def together(
        self, configs: list[TrainConfig], data: Dataset, run: Callable[[Ensemble], None] | None = None, **options: Any
    ) -> Ensemble:
        """A trained ensemble (``run`` may say how): by replayed CUDA graphs, and once a capture has failed by single launches."""
        while True:
            ensemble = Ensemble(configs, data, graph=self.graph, **options)
            try:
                (Ensemble.run if run is None else run)(ensemble)
                if ensemble.device.type == "cuda":
                    torch.cuda.synchronize()  # what failed on the device is known here
                return ensemble
            except RuntimeError as error:
                if not ensemble.use_graph:
                    raise
                print(f"CUDA graphs do not work here ({str(error)[:300]}); launching one by one", flush=True)
            self.graph = False
            del ensemble
            gc.collect()
            torch.cuda.empty_cache()

    def main(self) -> None:
        try:
            self.work()
        except OutOfTime:
            print(f"out of time: {self.again}")
        self.finish()

    def finish(self) -> None:
        self.results.save()


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    """Parts of nearly equal length, none above ``size``."""
    parts = math.ceil(len(items) / size)
    for k in range(parts):
        yield items[k * len(items) // parts : (k + 1) * len(items) // parts]


def held_out(data: Dataset) -> Dataset:
    """For tuning: the training set without its last twelfth, which stands in for the test set."""
    n = len(data) - len(data) // 12
    x, y = data.x_train, data.y_train
    return replace(data, x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:])
