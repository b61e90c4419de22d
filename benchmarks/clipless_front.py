"""The Pareto fronts of clipless training beside DP-SGD: tuned on a part of the training set, then the test set, read once.

    python benchmarks/clipless_front.py --json front.json --workers 5 --iso-device cuda --budget 1200
    python benchmarks/clipless_front.py --json front.json --table --figure front.svg

Each split of the noise and DP-SGD get the same number of trials (`SEARCH`), all at ε = 3 with the held-out sixth of the
*training* set as judge: nine settings, then three variations of the best. The winner is trained on the whole training set
at every ε, with several seeds, and read once on the test set. Tuning is not paid for, as in the papers.

Runs are independent and go to ``--workers`` processes of one thread each; those of DP-SGD may go to a GPU. Every finished
run is written at once, ``--resume`` continues, and after ``--budget`` seconds no new run is started.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from clipless_front_tables import METHODS, figure, settings, table, words
from resumable import Budget, Results, Row, named

from erlangen.accounting import noise_multiplier
from erlangen.data import Dataset, load
from erlangen.experiments.clipless import EPSILONS, config
from erlangen.experiments.tuning import split
from erlangen.lipschitz import backpropagate_bounds
from erlangen.models import make_model
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

#: ε at which settings are chosen, and the part of the training set that judges them
TUNED_AT, HELD_OUT = 3.0, 1 / 6
#: rows at a time on a GPU
PHYSICAL = 2048
#: what makes a run another one
KNOWN_BY = ("data", "method", "epsilon", "seed", "round", "setting")
Setting = dict[str, Any]


LINEAR: Setting = {"model": "lipschitz-mlp", "model_options": {"hidden": []}}
DENSE: Setting = {"model": "lipschitz-mlp", "model_options": {"hidden": [64]}}
PATCHES: Setting = {"model": "lipschitz-patches", "model_options": {"patch": 4, "width": 16}}
CNN: Setting = {"model": "cnn", "model_options": {"width": 16}}
STRIDED: Setting = {"model": "opacus-cnn", "model_options": {}}


def lipschitz(network: Setting, lr: float) -> Setting:
    return {**network, "lr": lr, "loss": {"name": "hinge", "margin": 0.05}}


def clipped(network: Setting, rate: float, bound: float) -> Setting:
    """``rate`` is in units of 1/C, so that the same one fits every bound."""
    return {**network, "lr": rate / bound, "max_grad_norm": bound}


#: the trials of a method: first settings, then variations of the best of them
SEARCH: dict[str, tuple[list[Setting], list[Setting]]] = {
    "clipless": (
        [lipschitz(network, lr) for network in (LINEAR, DENSE, PATCHES) for lr in (0.3, 1.0, 3.0)],
        [{"loss": {"name": "hinge", "margin": margin}} for margin in (0.02, 0.1, 0.2)],
    ),
    "iso": (
        [clipped(net, rate, c) for net, c in ((CNN, 0.1), (CNN, 1.0), (STRIDED, 1.0)) for rate in (0.1, 0.3, 1.0)],
        [
            {"schedule": "cosine"},
            {**CNN, "model_options": {"width": 32}},
            {"model": "mlp", "model_options": {"width": 64}},
        ],
    ),
}
assert len({len(first) + len(second) for first, second in SEARCH.values()}) == 1


@dataclasses.dataclass(frozen=True)
class Task:
    """One run. ``round`` is 0 or 1 while tuning and None on the front."""

    data: str
    method: str
    epsilon: float
    seed: int
    round: int | None
    setting: Setting
    sigma: float
    device: str = "cpu"
    steps: int | None = None

    @property
    def given(self) -> Row:
        """The same run, whatever machine it is on."""
        return {field: getattr(self, field) for field in KNOWN_BY}

    @property
    def key(self) -> str:
        return named(self.given, KNOWN_BY)

    def config(self) -> TrainConfig:
        setting = dict(self.setting)
        if self.method != "iso":
            setting["mechanism_options"] = {"split": self.method, "loss": setting.pop("loss")}
        changes = {**setting, "noise_multiplier": self.sigma, "seed": self.seed, "device": self.device}
        if self.device == "cuda":  # a GPU may be shared: parts of a batch, which change nothing but memory
            changes["max_physical_batch"] = PHYSICAL
        return config(self.data, self.method, None, **changes, **({"steps": self.steps} if self.steps else {}))


@functools.cache
def records(name: str) -> Dataset:
    return load(name)


@functools.cache
def held_out(name: str) -> Dataset:
    return split(records(name), HELD_OUT)


def fit(task: Task) -> Row:
    """One run, and its row. A trial keeps σ and the sampling rate of the run that it stands for."""
    whole = records(task.data)
    data = whole if task.round is None else held_out(task.data)
    settings = task.config()
    settings = dataclasses.replace(settings, batch=settings.batch * len(data) / len(whole)).settled(len(data))
    started = time.perf_counter()
    session = Session(settings, data)
    while session.step_count < settings.steps:
        session.step()
    scores = session.evaluate()
    row = {**dataclasses.asdict(task), "delta": settings.delta, "batch": settings.batch, "steps": settings.steps}
    row |= {"accuracy": scores["test_accuracy"], "seconds": time.perf_counter() - started}
    row |= {"parameters": sum(p.numel() for p in session.model.parameters()), "torch": torch.__version__}
    return row | {"spent": session.epsilon()} if task.round is None else row


@functools.cache
def same_bounds(name: str, setting: str) -> bool:
    """Whether every parameter of the setting's network has the same certified sensitivity."""
    chosen, data = json.loads(setting), records(name)
    network = make_model(chosen["model"], data.input_shape, data.classes, **chosen["model_options"])
    return len(set(backpropagate_bounds(network, 1.0).values())) == 1


class Study:
    """All runs, in an order in which each knows what it needs; finished ones are in the file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.json.exists() and not arguments.resume:
            raise SystemExit(f"{arguments.json} exists: give --resume to continue it, or another --json")
        self.results = Results(arguments.json, {"rows": KNOWN_BY})
        self.names, self.methods = arguments.data.split(","), arguments.methods.split(",")
        self.seeds, self.steps, self.iso_device = arguments.seeds, arguments.steps, arguments.iso_device
        self.device = arguments.device
        self.results.hold({"steps": self.steps}, unsaid=self.results.content)
        self.results.content |= {"machine": platform.processor() or platform.machine(), "steps": self.steps}
        #: of runs that raised an error; they are tried again by --resume
        self.failed: set[str] = set()
        self.sigmas: dict[tuple[str, float], float] = {}

    @property
    def rows(self) -> list[Row]:
        return self.results.rows("rows")

    def calibrate(self, pool: ProcessPoolExecutor) -> None:
        """σ of every ε, once per sampling rate and number of steps."""
        usual = {name: config(name, "iso", TUNED_AT) for name in self.names}
        wanted = {(n, e): (e, c.delta, c.batch / len(records(n)), self.steps or c.steps)
                  for n, c in usual.items() for e in (TUNED_AT, *EPSILONS)}  # fmt: skip
        different = list(dict.fromkeys(wanted.values()))
        found = dict(zip(different, pool.map(noise_multiplier, *zip(*different, strict=True)), strict=True))
        self.sigmas = {key: found[value] for key, value in wanted.items()}

    def task(self, name: str, method: str, epsilon: float, seed: int, round_: int | None, setting: Setting) -> Task:
        device = self.iso_device if method == "iso" else self.device
        return Task(name, method, epsilon, seed, round_, setting, self.sigmas[name, epsilon], device, self.steps)

    def done(self, task: Task) -> Row | None:
        return self.results.find("rows", task.given)

    def best(self, name: str, method: str, last: int) -> Setting | None:
        """The setting with the highest held-out accuracy in rounds 0 … last; None while one of them is not finished."""
        found = []
        for task in self.trials(name, method, last):
            row = None if task is None else self.done(task)
            if row is None:
                return None
            found.append((row["accuracy"], row["setting"]))
        return max(found, key=lambda pair: pair[0])[1]

    def trials(self, name: str, method: str, last: int = 1) -> Iterator[Task | None]:
        """The trials of a method; None stands for those of a second round that nobody can know yet."""
        first, second = SEARCH["iso" if method == "iso" else "clipless"]
        for setting in first:
            yield self.task(name, method, TUNED_AT, 0, 0, setting)
        if last:
            best = self.best(name, method, 0)
            for change in second:
                yield None if best is None else self.task(name, method, TUNED_AT, 0, 1, {**best, **change})

    def tasks(self) -> list[Task]:
        """What can be run now and is not finished, the most wanted first."""
        wanted = [t for name in self.names for m in self.methods for t in self.trials(name, m) if t is not None]
        chosen = {(n, m): self.best(n, m, 1) for n in self.names for m in self.methods}
        for seed in range(self.seeds):
            for (name, method), setting in chosen.items():
                if setting is not None:
                    wanted += [self.task(name, method, epsilon, seed, None, setting) for epsilon in EPSILONS]
        open_ = [t for t in wanted if self.done(t) is None and t.key not in self.failed]
        return [t for t in open_ if not ("local" in self.methods and self._taken_from_local(t))]

    def _taken_from_local(self, task: Task) -> bool:
        """Where all Δ are equal, "global" and "local" add the same noise: one run stands for both, and is copied."""
        if task.method != "global" or not same_bounds(task.data, json.dumps(task.setting)):
            return False
        twin = self.done(dataclasses.replace(task, method="local"))
        if twin is not None:
            self.keep({**twin, "method": "global", "same_as": "local"})
        return True

    def keep(self, row: Row) -> None:
        self.results.keep("rows", [row])
        kind = "front" if row["round"] is None else f"trial {row['round'] + 1}"
        head = f"{row['data']:14} {row['method']:8} ε={row['epsilon']:g} seed {row['seed']} {kind:8}"
        print(f"{head} {100 * row['accuracy']:6.2f} %  {row['seconds']:6.1f} s  {words(row['setting'])}", flush=True)


def run(study: Study, workers: int, iso_workers: int, budget: float) -> bool:
    """Everything that fits into the budget; true if nothing is left."""
    context = multiprocessing.get_context("spawn")
    separate = study.iso_device != study.device
    with (
        ProcessPoolExecutor(workers, context, _quiet) as pool,
        ProcessPoolExecutor(iso_workers, context, _quiet) as other,
    ):
        running: dict[Future[Row], Task] = {}
        study.calibrate(pool)
        clock = Budget(budget)
        while True:
            if clock.left() > 0:
                for task in study.tasks():
                    aside = separate and task.method == "iso"
                    busy = sum(1 for t in running.values() if (separate and t.method == "iso") == aside)
                    if busy < (iso_workers if aside else workers) and all(t.key != task.key for t in running.values()):
                        running[(other if aside else pool).submit(fit, task)] = task
            if not running:
                break
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                task = running.pop(future)
                try:
                    study.keep(future.result())
                except (RuntimeError, ValueError) as error:  # of this run alone: say which, and go on with the others
                    print(f"failed: {task.key}: {error}", flush=True)
                    study.failed.add(task.key)
    return not (study.tasks() or study.failed)


def _quiet() -> None:
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="all runs; written after each")
    parser.add_argument("--data", default="mnist,fashion_mnist,cifar10", help="comma-separated names")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=5, help="processes of one thread each")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--iso-device", default="cpu", choices=["cpu", "cuda"], help="where DP-SGD's runs go")
    parser.add_argument("--iso-workers", type=int, default=1, help="processes for them, if it is another device")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run is started")
    parser.add_argument("--steps", type=int, help="in place of the preset's; then it is no result")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--table", action="store_true", help="train nothing: print what the file holds, as Markdown")
    parser.add_argument("--figure", type=Path, help="train nothing: draw what the file holds")
    arguments = parser.parse_args()
    if arguments.table or arguments.figure:
        rows = json.loads(arguments.json.read_text())["rows"]
        if arguments.table:
            print(f"{settings(rows)}\n\n{table(rows)}")
        if arguments.figure:
            figure(rows, arguments.figure)
        return
    # large batches are allocated anew at every step: keep their pages instead of asking for them again (glibc)
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**36))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    study = Study(arguments)
    complete = run(study, arguments.workers, arguments.iso_workers, arguments.budget)
    print("complete" if complete else f"{len(study.tasks())} known runs are left: --resume continues")
    print(f"\n{settings(study.rows)}\n\n{table(study.rows)}")


if __name__ == "__main__":
    main()
