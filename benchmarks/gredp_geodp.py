"""GReDP's Table 1 (LeNet-5, MNIST), GeoDP's Table II (CNN, MNIST) and Figure 5 on one GPU: many runs at once.

    python benchmarks/gredp_geodp.py --data FOLDER --out frequency.json --budget 280
    python benchmarks/gredp_geodp.py --data FOLDER --out frequency.json --budget 280 --resume

FOLDER holds mnist.npz. Every method gets the same number of tuning trials (step length × C × momentum 0 or 0.9) on a
split of the *training* set, then all seeds on the whole of it; the test set is read once. Methods of one family train
together as an ensemble; runs of one seed start from the same weights and draw the same batches, with noise of their own.
Finished runs are written as they come; what is left is done with --resume. Needs torch and numpy; noise multipliers are
stored in gredp_tasks.py, so that no accountant is needed (``--epsilon`` adds the true ε afterwards). More tasks:
GReDP's Table 3 and Figures 3 to 5 for LeNet-5, Model-3 on CIFAR-10. ``--processes 4`` trains runs one by one on CPU cores:
for logistic regression.

The other rows of GeoDP's Tables II and III are tasks of their own and not tuned: a row takes the step length, C and momentum
of the method that it extends (DP's for DP+SUR, DP+PSAC's for DP+SUR+PSAC, GeoDP's for GeoDP+IS, …), which must have been
tuned in the same file or in the one of ``--picks``:

    python benchmarks/gredp_geodp.py --data FOLDER --out frequency.json --resume --seeds 3 --tasks geodp-table2-companions

Importance sampling and selective updates train one run after another, from the weights of their pair, with batches and
noise of their own (these need dp_accounting, because a session charges every step).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from gredp_geodp_tasks import DEFAULT, TASKS, Options, Pick, Task, shortened
from resumable import Bench, Row, held_out

from erlangen.data import Dataset, load
from erlangen.models import make_model
from erlangen.streams import Stream
from erlangen.training.config import TrainConfig
from erlangen.training.device import pick_device
from erlangen.training.padding import physical_size

if TYPE_CHECKING:
    from erlangen.training.ensemble import Ensemble
    from erlangen.training.session import Session


#: runs trained at once, where nothing else is said
MEMBERS = 48


@dataclass(frozen=True)
class Trial:
    """One run: a method in a setting, with its step length, bound, momentum and seed."""

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

    @property
    def given(self) -> Row:
        return {"key": self.key}

    @property
    def family(self) -> str:
        return f"{self.task} {TASKS[self.task].shape(self.method, self.setting)}"

    @property
    def cell(self) -> str:
        return f"{self.task} | {self.setting} | {self.method}"

    @property
    def conditions(self) -> Options:
        """What the key does not say."""
        task = TASKS[self.task]
        return {**task.options(self.method, self.setting), "tuning_steps": task.tuning_steps}

    @property
    def alone(self) -> bool:
        return TASKS[self.task].methods[self.method].alone

    @property
    def pair(self) -> str:
        """The runs that share initial weights and batches: what is claimed with what is true at the same level."""
        task, level = TASKS[self.task], self.setting.replace("claimed", "true").removesuffix(" true")
        return f"{task.beside or task.base or self.task} {level} {self.seed}"

    def config(self, device: str) -> TrainConfig:
        pick = (self.length, self.bound, self.momentum)
        return TASKS[self.task].config(self.method, self.setting, pick, self.seed, device)


class Tables(Bench[Trial]):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, options.resume)
        self.results.hold({"steps": options.steps}, unsaid={"steps": 0})
        #: methods that could not be run, and why
        self.failed: dict[str, str] = {}

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, phase: str, trials: Iterable[Trial]) -> None:
        """Train what is not known yet and write it down: in processes, or one after another, or as ensembles."""
        trials = list(trials)
        self.results.hold({t.cell: t.conditions for t in trials}, unsaid={})
        left = self.results.left(phase, trials)
        if self.options.processes:
            self.run_apart(phase, left)
        else:
            self.run_alone(phase, [t for t in left if t.alone])
            super().run(phase, [t for t in left if not t.alone])

    def members(self, trial: Trial) -> int:
        return self.options.members or TASKS[trial.task].members or MEMBERS

    def where(self) -> str:
        return "cpu" if self.options.processes else super().where()

    def train(self, phase: str, trials: list[Trial]) -> list[Row]:
        task, steps = TASKS[trials[0].task], self.options.steps
        configs = [shortened(t.config(self.options.device), steps) for t in trials]
        if phase == "tuning" and task.tuning_steps and not steps:
            configs = [replace(c, steps=task.tuning_steps) for c in configs]
        looks: list[list[Row]] = []
        ensemble = self.together(
            configs, dataset(str(task.common["data"]), phase, bool(steps)), partial(watched, looks, task.looks),
            run_ids=[t.pair for t in trials], rows=None if steps else task.rows or part_of(task, configs),
            precision=getattr(torch, task.precision) if task.precision else None,
        )  # fmt: skip
        if not looks:
            return ensemble.evaluate()
        return [{**seen[-1], "curve": seen} for seen in zip(*looks, strict=True)]

    def run_alone(self, phase: str, trials: list[Trial]) -> None:
        """One after another on this device. A method that fails does not keep the others from running."""
        for trial in trials:
            if trial.method in self.failed:
                continue
            self.budget.check()
            started = time.perf_counter()
            try:
                found = one((trial, phase, self.options.steps, self.options.device))
            except RuntimeError as error:
                self.failed[trial.method] = str(error)[:200]
                continue
            self.keep(phase, [trial], [found])
            gc.collect()
            print(f"{phase} {trial.task} {trial.method}: {time.perf_counter() - started:.1f} s", flush=True)

    def run_apart(self, phase: str, trials: list[Trial]) -> None:
        from erlangen.experiments.pool import Pool

        if trials:
            self.budget.check()
        jobs = [(trial, phase, self.options.steps, "cpu") for trial in trials]
        for (trial, *_), scores in Pool(self.options.processes).run(one, jobs):
            self.keep(phase, [trial], [scores])
            self.budget.check()

    def summary(self, content: Row) -> Row:
        return {"table": table(content["runs"])}

    # -- phases ---------------------------------------------------------------------------------------------------

    def methods(self, task: Task) -> list[str]:
        return [m for m in task.methods if not self.options.methods or m in self.options.methods]

    def tune(self, task: Task, stage: tuple[str, ...]) -> None:
        seeds = range(1000, 1000 + self.options.tune_seeds)
        self.run("tuning", [
            Trial(task.name, method, setting, *pick, seed)
            for method in self.methods(task) for setting in task.where(method, stage) for pick in task.grid(method)
            for seed in seeds
        ])  # fmt: skip

    def best(self, task: Task, method: str, setting: str, momentum: float | None = None) -> Pick:
        """The pick with the best held-out accuracy (or loss), the mean over tuning seeds."""
        found = tried(self.results.rows("tuning"), task, method, setting)
        return max((pick for pick in found if momentum in (None, pick[2])), key=found.__getitem__)

    def borrowed(self, task: Task, method: str, setting: str) -> set[Pick]:
        """What was tuned for the method that this one is like; nothing, and a line that says so, until all of it was."""
        assert task.base is not None
        base, like, source = TASKS[task.base], task.methods[method].like, self.options.picks or self.options.out
        assert like is not None
        rows = json.loads(source.read_text())["tuning"] if self.options.picks else self.results.rows("tuning")
        found, grid = tried(rows, base, like, setting), base.grid(like)
        lacking = len(set(grid) - found.keys())
        if lacking:
            print(
                f"{task.name}: {method} at {setting} is left out: {lacking} of the {len(grid)} trials of {base.name}, "
                f"{like}, {setting} are not in {source}. Run --tasks {base.name} first, or name its file with --picks"
            )
            return set()
        return {max(found, key=found.__getitem__)}

    def picks(self, task: Task, method: str, setting: str) -> list[Pick]:
        """What is measured: the best options, the best without momentum, and those that the task fixes."""
        if task.base is not None:
            return sorted(self.borrowed(task, method, setting))
        plain = (0.0,) if 0.0 in task.momenta else ()
        tuned = {self.best(task, method, setting, mu) for mu in (None, *plain)} if task.lengths else set()
        return sorted({*tuned, *task.fixed(method)})

    def measure(self, task: Task, stage: tuple[str, ...]) -> None:
        trials = [
            Trial(task.name, method, setting, *pick, seed)
            for method in self.methods(task) for setting in task.where(method, stage)
            for pick in self.picks(task, method, setting) for seed in range(self.options.seeds)
        ]  # fmt: skip
        if not task.lengths and task.base is None:
            self.share(trials)
        self.run("runs", trials)

    def share(self, trials: list[Trial]) -> None:
        """Ablations have cells in common with each other and with Table 1: what was trained with the same options, seed and
        precision is taken over, and its row says from where. A curve needs the looks on the way."""
        known = [row for row in self.results.rows("runs") if "curve" in row or TASKS[trials[0].task].looks == 1]
        made = {same(t): row for row in known if (t := Trial(*row["key"])).task in TASKS and not t.alone}
        taken = [(t, made[same(t)]) for t in self.results.left("runs", trials) if same(t) in made]
        rows = [{**row, **t.given, "as": row.get("as", row["key"])} for t, row in taken]
        for row in rows:
            row.pop("curve", None)
        if rows:
            self.results.hold({t.cell: t.conditions for t, _ in taken}, unsaid={})
            self.results.keep("runs", rows)
            print(f"{trials[0].task}: {len(rows)} of {len(trials)} runs are those of other tables", flush=True)

    def work(self) -> None:
        for task in map(TASKS.__getitem__, self.options.tasks):
            for stage in task.stages or (tuple(task.settings),):
                self.tune(task, stage)
                self.measure(task, stage)

    def finish(self) -> None:
        if self.options.epsilon:
            self.results.content["epsilon"] = true_epsilons(self.results.rows("runs"))
        super().finish()
        show(self.results.content)
        if self.failed:
            raise SystemExit("\n".join(f"{method} failed: {why}" for method, why in self.failed.items()))


def part_of(task: Task, configs: list[TrainConfig]) -> int | None:
    """Rows of a member at a time, so that those of all members are not more than the task allows; None: a batch at a time."""
    records = len(dataset(str(task.common["data"]), "runs"))
    whole = physical_size(records, configs[0].batch, len(configs))
    passes = math.ceil(whole * len(configs) / (task.most_rows or math.inf))
    return 8 * math.ceil(whole / passes / 8) if passes > 1 else None


def watched(looks: list[list[Row]], count: int, ensemble: Ensemble) -> None:
    """Train to the end, with ``count`` looks at the test set at equal distances; one is nobody's business until then."""
    looks.clear()
    steps = ensemble.config.steps
    for k in range(count if count > 1 else 0):
        ensemble.run(steps * (k + 1) // count - ensemble.step_count)
        looks.append([{"step": ensemble.step_count, **scores} for scores in ensemble.evaluate()])
    ensemble.run()


def same(trial: Trial) -> str:
    """Equal for runs that differ in nothing but the table that they are in."""
    config = trial.config("auto")
    return json.dumps([asdict(config), TASKS[trial.task].precision, trial.alone], sort_keys=True)


@lru_cache(maxsize=2)
def dataset(name: str, phase: str, short: bool = False) -> Dataset:
    d = held_out(load(name)) if phase == "tuning" else load(name)
    assert d.x_test is not None
    assert d.y_test is not None
    if not short:
        return d
    return replace(d, x_train=d.x_train[:2000], y_train=d.y_train[:2000], x_test=d.x_test[:200], y_test=d.y_test[:200])


#: rows of a physical batch of a run that trains alone
ROWS = {"cpu": 1024, "cuda": 4096}


def one(job: tuple[Trial, str, int, str]) -> dict[str, float]:
    """One run in this process. Its streams carry its whole name: it shares none with another, but for initial weights."""
    from erlangen.training.session import Session

    trial, phase, steps, device = job
    task, where = TASKS[trial.task], pick_device(device)
    config = shortened(replace(trial.config(where), max_physical_batch=ROWS.get(where.partition(":")[0], 1024)), steps)
    if task.base is not None:
        config = replace(config, precision="bf16" if task.precision else "float32")  # as the ensembles beside it
    session = Session(config, dataset(config.data, phase, bool(steps)), "-".join(map(str, trial.key)))
    if task.base is not None:
        session.model.load_state_dict(start(session, trial.pair))
    while session.step_count < session.config.steps:
        session.step()
    return session.evaluate()


def start(session: Session, pair: str) -> dict[str, torch.Tensor]:
    """The weights with which an ensemble's member of this pair begins."""
    config, data = session.config, session.dataset
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Stream("init", config.seed, pair).at(0).initial_seed())
        return make_model(config.model, data.input_shape, data.classes, **config.model_options).state_dict()


def tried(rows: list[Row], task: Task, method: str, setting: str) -> dict[Pick, float]:
    """Pick → its held-out accuracy (or minus its loss), the mean over tuning seeds."""
    found: dict[Pick, list[float]] = {}
    sign = -1 if task.score == "test_loss" else 1
    for row in rows:
        name, m, s, length, bound, momentum, _ = row["key"]
        if (name, m, s) == (task.name, method, setting):
            found.setdefault((length, bound, momentum), []).append(row[task.score] * sign)
    return {pick: statistics.fmean(values) for pick, values in found.items()}


# -- results --------------------------------------------------------------------------------------------------------

#: what each claimed advantage has to stand against
RIVALS = ("DP-SGD", "AUTO-S", "DP", "DP+AUTO-S")


def table(runs: list[Row]) -> list[Row]:
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
                    for key, other in rival_of(cells, name, setting, rival).items()
                },
            })  # fmt: skip
    return rows


def rival_of(cells: dict[tuple[str, str, str], Any], task: str, setting: str, rival: str) -> Any:
    """Pick → seed → accuracy of a rival in the same task, or in the one that it extends."""
    known = TASKS.get(task)
    where = (setting.replace("claimed", "true"), rival)
    return cells.get((task, *where)) or cells.get(((known and known.base) or task, *where), {})


def gap(values: dict[int, float], other: dict[int, float]) -> Row:
    """The mean difference over common seeds and its standard error."""
    gaps = [values[s] - other[s] for s in values if s in other]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return {"mean": statistics.fmean(gaps) if gaps else None, "standard_error": error, "seeds": len(gaps)}


def true_epsilons(runs: list[Row]) -> Row:
    """ε of every method, by its own events."""
    from erlangen.accounting import epsilon
    from erlangen.experiments.presets import step_event

    found: Row = {}
    for row in runs:
        trial = Trial(*row["key"])
        if trial.cell not in found:
            records = {"mnist": 60_000, "cifar10": 50_000}[trial.config("cpu").data]
            config = trial.config("cpu").settled(records)
            assert config.noise_multiplier is not None
            event = step_event(config, config.noise_multiplier, records)
            spent = {m: epsilon([(event, config.steps)], 1e-5, m) for m in ("pld", "rdp")}  # type: ignore[arg-type]
            found[trial.cell] = {m: e if math.isfinite(e) else "inf" for m, e in spent.items()}
    return found


def show(result: Row) -> None:
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
    parser.add_argument(
        "--tasks", nargs="+", default=DEFAULT, choices=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}"
    )
    parser.add_argument("--methods", nargs="+", help="only these of a task; all of them unless told")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tune-seeds", type=int, default=1)
    parser.add_argument("--members", type=int, help=f"runs trained at once; otherwise what the task says, or {MEMBERS}")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no ensemble is started")
    parser.add_argument("--steps", type=int, default=0, help="so few steps of small batches: to see that it runs")
    parser.add_argument(
        "--epsilon", action="store_true", help="add the true ε of what is in the file (needs dp_accounting)"
    )
    parser.add_argument("--no-graph", action="store_true", help="large ensembles gain nothing by CUDA graphs")
    parser.add_argument("--processes", type=int, default=0, help="runs one by one on so many CPU cores")
    parser.add_argument("--picks", type=Path, help="file with the tuning that companions take their options from")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    known = {method for task in options.tasks for method in TASKS[task].methods}
    if unknown := [method for method in options.methods or () if method not in known]:
        parser.error(f"--methods has {', '.join(map(repr, unknown))}; {', '.join(options.tasks)} have {', '.join(sorted(known))}")
    Tables(options).main()


if __name__ == "__main__":
    main()
