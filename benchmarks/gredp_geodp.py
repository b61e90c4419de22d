"""GReDP's Table 1 (LeNet-5, MNIST), GeoDP's Table II (CNN, MNIST) and Figure 5 on one GPU: many runs at once.

    python benchmarks/gredp_geodp.py --data FOLDER --out frequency.json --budget 280
    python benchmarks/gredp_geodp.py --data FOLDER --out frequency.json --budget 280 --resume

FOLDER holds mnist.npz. Every method gets the same number of tuning trials (learning rate × C, momentum 0 or 0.9) on a
split of the *training* set, then all seeds on the whole of it; the test set is read once. Methods of one family train
together as an ensemble. Finished runs are written as they come; what is left is done with --resume. Needs torch and
numpy; noise multipliers are stored below, so that no accountant is needed (``--epsilon`` adds the true ε afterwards).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from erlangen.data import Dataset, load
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble

Options = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One table: the runs' common options, σ of its settings, and its methods by family (one ensemble each)."""

    name: str
    common: Options
    sigmas: dict[str, float]
    #: name → (family, options, the settings it runs in)
    methods: dict[str, tuple[str, Options, tuple[str, ...]]]
    #: step lengths lr·C/(1 − momentum) that are tried
    lengths: tuple[float, ...]
    bounds: tuple[float, ...]
    #: rows of a member in memory at a time
    rows: int | None = None
    momenta: tuple[float, ...] = (0.0, 0.9)


# σ of ε = 1 (PLD) for 1,200 steps at q = 500/60,000; σ of a *claimed* ε = 1 by RDP; see ``--epsilon``
TRUE, CLAIMED = 1.3213, 1.4101
PUBLISHED = ("claimed",)
SOUND = ("true",)
CIRCULANT: Options = {"model_options": {"circulant": 4}}

LENET = Task(
    "gredp-table1",
    {"data": "mnist", "model": "lenet", "batch": 500, "steps": 1200, "delta": 1e-5, "ema": 0.99},
    {"true": TRUE, "claimed": CLAIMED},
    {
        "DP-SGD": ("dense", {}, SOUND),
        "Spectral-DP": ("dense", {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5}}, SOUND),
        "GReDP": ("dense", {"mechanism": "gredp"}, SOUND),
        "GReDP as published": ("dense", {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}, PUBLISHED),
        "AUTO-S": ("auto-s", {"clipping": "auto-s"}, SOUND),
        "DP-SGD, circulant": ("circulant", CIRCULANT, SOUND),
        "Spectral-DP, circulant": (
            "circulant", {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5}, **CIRCULANT}, SOUND,
        ),
        "GReDP, circulant": ("circulant", {"mechanism": "gredp", **CIRCULANT}, SOUND),
        "GReDP as published, circulant": (
            "circulant", {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}, **CIRCULANT}, PUBLISHED,
        ),
    },
    lengths=(0.25, 0.5, 1.0, 2.0),
    bounds=(0.1, 1.0),
)  # fmt: skip


def geodp(name: str, common: Options, sigmas: dict[str, float], betas: tuple[float, ...], **options: Any) -> Task:
    """DP against GeoDP: as published for each β, and the sound forms."""
    every = tuple(sigmas)
    methods: dict[str, tuple[str, Options, tuple[str, ...]]] = {
        "DP": ("flat", {}, every),
        "DP+AUTO-S": ("auto-s", {"clipping": "auto-s"}, every),
        "DP+PSAC": ("psac", {"clipping": "psac"}, every),
        "direction": ("direction", {"mechanism": "geodp"}, every),
        "shrink": ("direction", {"mechanism": "geodp", "mechanism_options": {"form": "shrink"}}, every),
    }
    for beta in betas:
        published = {"mechanism": "geodp", "mechanism_options": {"as_published": True, "beta": beta}}
        methods[f"GeoDP as published β={beta:g}"] = ("published", published, every)
    return Task(name, {"data": "mnist", "delta": 1e-5, "ema": 0.0, **common}, sigmas, methods, **options)


TABLE_2 = geodp(
    "geodp-table2", {"model": "geodp-cnn", "batch": 16384, "steps": 73}, {"σ=10": 10.0, "σ=1": 1.0}, (0.1,),
    lengths=(0.3, 0.8, 2.0), bounds=(0.1, 1.0), rows=1024, momenta=(0.0, 0.9),
)  # fmt: skip
FIGURE_5 = geodp(
    "geodp-fig5", {"model": "logistic", "batch": 4096, "steps": 350}, {"σ=10": 10.0, "σ=1": 1.0}, (1.0, 0.5),
    lengths=(0.1, 0.4, 1.6), bounds=(0.1,), rows=1024, momenta=(0.0, 0.9),
)  # fmt: skip
TASKS = {task.name: task for task in (LENET, TABLE_2, FIGURE_5)}


@dataclass(frozen=True)
class Trial:
    """One run: a method in a setting, with its learning rate, bound, momentum and seed."""

    task: str
    method: str
    setting: str
    length: float
    bound: float
    momentum: float
    seed: int

    @property
    def key(self) -> list[Any]:
        return [self.task, self.method, self.setting, self.length, self.bound, self.momentum, self.seed]

    def config(self, device: str) -> TrainConfig:
        task = TASKS[self.task]
        _, options, _ = task.methods[self.method]
        own = {**task.common, **options}
        return TrainConfig(
            **own, epsilon=None, noise_multiplier=task.sigmas[self.setting], max_grad_norm=self.bound,
            momentum=self.momentum, lr=self.length / self.bound * (1 - self.momentum), seed=self.seed, device=device,
            evaluations=1,
        )  # fmt: skip


class OutOfTime(Exception):
    pass


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.perf_counter()
        os.environ["ERLANGEN_DATA"] = str(options.data)
        again = options.resume and options.out.exists()
        self.result: dict[str, Any] = json.loads(options.out.read_text()) if again else {"tuning": [], "runs": []}
        self.before = self.result.get("seconds", 0.0)
        self.data = load("mnist")
        self.device = options.device

    # -- running --------------------------------------------------------------------------------------------------

    def split(self) -> Dataset:
        """The training set without its last twelfth, which stands in for the test set."""
        d, held = self.data, len(self.data) // 12
        return replace(
            d, x_train=d.x_train[:-held], y_train=d.y_train[:-held], x_test=d.x_train[-held:], y_test=d.y_train[-held:]
        )

    def run(self, phase: str, trials: list[Trial], data: Dataset) -> None:
        """Train what is not known yet, a family at a time, and write it down."""
        done = {json.dumps(row["key"]) for row in self.result[phase]}
        left = [t for t in trials if json.dumps(t.key) not in done]
        for (task, family), members in families(left).items():
            for part in batched(members, self.options.members):
                if time.perf_counter() - self.started > self.options.budget:
                    raise OutOfTime
                started = time.perf_counter()
                configs = [self.shortened(t.config(self.device)) for t in part]
                rows = None if self.options.steps else TASKS[task].rows
                ids = ["-".join(map(str, t.key)) for t in part]
                ensemble = self.trained(configs, data, ids, rows)
                scores = ensemble.evaluate()
                seconds = time.perf_counter() - started
                for trial, score in zip(part, scores, strict=True):
                    self.result[phase].append({"key": trial.key, **score})
                self.save()
                print(f"{phase} {task} {family}: {len(part)} runs in {seconds:.1f} s", flush=True)

    def trained(self, configs: list[TrainConfig], data: Dataset, ids: list[str], rows: int | None) -> Ensemble:
        """By replayed CUDA graphs; once a capture has failed, by single launches."""
        graph = not self.options.no_graph
        ensemble = Ensemble(configs, data, run_ids=ids, rows=rows, graph=graph)
        try:
            ensemble.run()
        except RuntimeError as error:
            if not (graph and ensemble.use_graph):
                raise
            print(f"CUDA graphs do not work here ({str(error)[:200]}); launching one by one", flush=True)
            self.options.no_graph = True
            ensemble = Ensemble(configs, data, run_ids=ids, rows=rows, graph=False)
            ensemble.run()
        return ensemble

    def shortened(self, config: TrainConfig) -> TrainConfig:
        o = self.options
        return replace(config, steps=o.steps, batch=min(config.batch, 64)) if o.steps else config

    def save(self) -> None:
        self.result["seconds"] = self.before + time.perf_counter() - self.started
        self.result["versions"] = {"torch": torch.__version__, "device": self.where()}
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.options.out.with_suffix(".new")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.options.out)

    def where(self) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() and self.device != "cpu" else "cpu"

    # -- phases ---------------------------------------------------------------------------------------------------

    def tune(self, task: Task) -> None:
        seeds = range(1000, 1000 + self.options.tune_seeds)
        trials = [
            Trial(task.name, method, setting, length, bound, momentum, seed)
            for method, (_, _, settings) in task.methods.items()
            for setting in settings
            for length in task.lengths
            for bound in task.bounds
            for momentum in task.momenta
            for seed in seeds
        ]
        self.run("tuning", trials, self.split())

    def best(self, task: Task, method: str, setting: str, momentum: float | None = None) -> tuple[float, float, float]:
        """(length, bound, momentum) with the best held-out accuracy, the mean over tuning seeds."""
        found: dict[tuple[float, float, float], list[float]] = {}
        for row in self.result["tuning"]:
            name, m, s, length, bound, mu, _ = row["key"]
            if (name, m, s) == (task.name, method, setting) and momentum in (None, mu):
                found.setdefault((length, bound, mu), []).append(row["test_accuracy"])
        return max(found, key=lambda k: statistics.fmean(found[k]))

    def measure(self, task: Task) -> None:
        trials = []
        for method, (_, _, settings) in task.methods.items():
            for setting in settings:
                picks = {self.best(task, method, setting), self.best(task, method, setting, 0.0)}
                trials += [
                    Trial(task.name, method, setting, *pick, seed)
                    for pick in picks
                    for seed in range(self.options.seeds)
                ]
        self.run("runs", trials, self.data)

    def main(self) -> None:
        try:
            for name in self.options.tasks:
                self.tune(TASKS[name])
                self.measure(TASKS[name])
        except OutOfTime:
            print("out of time: run again with --resume")
        self.result["table"] = table(self.result["runs"])
        if self.options.epsilon:
            self.result["epsilon"] = true_epsilons(self.result["runs"])
        self.save()
        show(self.result)


def families(trials: list[Trial]) -> dict[tuple[str, str], list[Trial]]:
    found: dict[tuple[str, str], list[Trial]] = {}
    for t in trials:
        found.setdefault((t.task, TASKS[t.task].methods[t.method][0]), []).append(t)
    return found


def batched(items: list[Trial], size: int) -> Iterator[list[Trial]]:
    """Parts of nearly equal length, none above ``size``."""
    parts = math.ceil(len(items) / size)
    for k in range(parts):
        yield items[k * len(items) // parts : (k + 1) * len(items) // parts]


# -- results --------------------------------------------------------------------------------------------------------

#: what each claimed advantage has to stand against
RIVALS = ("DP-SGD", "AUTO-S", "DP", "DP+AUTO-S")


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation of every method at its best options and without momentum, paired with its rivals."""
    cells: dict[tuple[str, str, str], dict[tuple[float, ...], dict[int, float]]] = {}
    for row in runs:
        name, method, setting, length, bound, momentum, seed = row["key"]
        options = cells.setdefault((name, setting, method), {})
        options.setdefault((length, bound, momentum), {})[seed] = 100 * row["test_accuracy"]
    rows = []
    for (name, setting, method), options in cells.items():
        for pick, values in options.items():
            accuracy = list(values.values())
            rows.append({
                "task": name, "setting": setting, "method": method, "length": pick[0], "bound": pick[1],
                "momentum": pick[2], "mean": statistics.fmean(accuracy), "seeds": len(accuracy),
                "std": statistics.stdev(accuracy) if len(accuracy) > 1 else None, "paired": {
                    f"{rival} momentum {key[2]:g}": gap(values, other)
                    for rival in RIVALS if rival != method
                    for key, other in cells.get((name, setting if rival != "DP-SGD" else "true", rival), {}).items()
                },
            })  # fmt: skip
    return rows


def gap(values: dict[int, float], other: dict[int, float]) -> dict[str, Any]:
    """The mean difference over common seeds and its standard error."""
    gaps = [values[s] - other[s] for s in values if s in other]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return {"mean": statistics.fmean(gaps) if gaps else None, "standard_error": error, "seeds": len(gaps)}


def true_epsilons(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """ε of every method, by its own events."""
    from erlangen.accounting import epsilon
    from erlangen.experiments.presets import step_event

    found: dict[str, Any] = {}
    for row in runs:
        trial = Trial(*row["key"])
        name = f"{trial.task} | {trial.setting} | {trial.method}"
        if name not in found:
            config = trial.config("cpu").settled(60_000)
            assert config.noise_multiplier is not None
            event = step_event(config, config.noise_multiplier, 60_000)
            spent = {m: epsilon([(event, config.steps)], 1e-5, m) for m in ("pld", "rdp")}  # type: ignore[arg-type]
            found[name] = {m: e if math.isfinite(e) else "inf" for m, e in spent.items()}
    return found


def show(result: dict[str, Any]) -> None:
    for row in result["table"]:
        error = 0.0 if row["std"] is None else row["std"]
        print(
            f"{row['task']:14} {row['setting']:8} {row['method']:32} lr·C {row['length']:5.2f} C {row['bound']:4.2g} "
            f"momentum {row['momentum']:.1f}   {row['mean']:6.2f} ± {error:.2f} ({row['seeds']})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tune-seeds", type=int, default=1)
    parser.add_argument("--members", type=int, default=48, help="runs trained at once")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no ensemble is started")
    parser.add_argument("--steps", type=int, default=0, help="so few steps of small batches: to see that it runs")
    parser.add_argument(
        "--epsilon", action="store_true", help="add the true ε of what is in the file (needs dp_accounting)"
    )
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="auto")
    Bench(parser.parse_args()).main()


if __name__ == "__main__":
    main()
