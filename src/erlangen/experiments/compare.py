"""Mechanisms side by side: the same data, the same true ε, the same tuning effort, several seeds, paired intervals.

out/
  tuning/*.json       every trial: setting, score; written once, never run again
  runs/*/             the final runs, each with its certificate
  comparison.json     rows, trials and what the ε covers
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from erlangen.atomic import write_atomically
from erlangen.data import Dataset
from erlangen.experiments import tuning
from erlangen.experiments.pool import Pool
from erlangen.experiments.runner import paired
from erlangen.training.built import load_data, require_known
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.normalise import wants_private
from erlangen.training.run import train
from erlangen.training.session import Session

Watch = Callable[[str, int, int], None]

ONE_RUN = (
    " It is the ε of one run: the seeds of a row, and all rows together, were made from the same records and have spent more "
    "(erlangen account adds runs up)."
)
NOT_TUNED = "No setting was tuned: every mechanism ran with the given options."
NOT_ACCOUNTED = (
    "Each mechanism's two settings were chosen at each ε by {trials} on held-out training records. The ε of this table "
    "covers the final runs only, NOT this choice: before a model tuned on the same private data is released the search must be "
    "paid for (--accounted shows what that costs), or be done on public data."
)
ACCOUNTED = (
    "The ε of this table covers the whole search (repeat and select, RDP): a geometric number of trials of mean {trials}, each "
    "with a noisy score; the chosen trial's own model counts, and the other trials, which are kept for study, are not covered. "
    "Seeded, like every comparison: an experiment, not for release."
)


@dataclass(frozen=True)
class Comparison:
    """The grid. ``base`` holds every other option; ``models`` names another network for some mechanisms."""

    base: TrainConfig
    mechanisms: tuple[str, ...]
    epsilons: tuple[float, ...]
    seeds: int = 5
    trials: int = 6
    held_out: float = 0.2
    accounted: bool = False
    models: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("mechanism", self.mechanisms), ("epsilon", self.epsilons)):
            if not value or len(set(value)) < len(value):
                raise ConfigError(f"{name} is {list(value)}; give at least one, each once")
        for name, number, least in (("seeds", self.seeds, 1), ("trials", self.trials, 0)):
            if number < least:
                raise ConfigError(f"{name} is {number}; give at least {least}")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out is {self.held_out}; give a share between 0 and 1")
        if self.accounted and self.trials < 1:
            raise ConfigError("accounted tuning needs trials; give --trials, or leave out --accounted")
        if self.accounted and self.base.unit is not None:
            raise ConfigError(
                f"accounted tuning scores held-out records, and a {self.base.unit} with k of them would move the score by k where "
                "1 is paid for: leave out --accounted, or --unit"
            )
        if wants_private(self.base):
            raise ConfigError(
                "normalise is 'private': the runs of a comparison would share constants that none of them counts; give public "
                "constants, normalise=MEAN/STD"
            )
        if self.base.secure:
            raise ConfigError(
                "a comparison over seeds is reproducible by design: leave out secure, and train for release later"
            )

    def options(self, mechanism: str) -> TrainConfig:
        """What one mechanism trains with, at an ε that is still open."""
        model = self.models.get(mechanism, self.base.model)
        options = self.base.model_options if model == self.base.model else {}
        return dataclasses.replace(self.base, mechanism=mechanism, model=model, model_options=options)

    def words(self) -> str:
        if not self.trials:
            return NOT_TUNED + ONE_RUN
        if self.accounted:
            return ACCOUNTED.format(trials=self.trials) + ONE_RUN
        return NOT_ACCOUNTED.format(trials=f"{self.trials} trial{'' if self.trials == 1 else 's'}") + ONE_RUN


@dataclass(frozen=True)
class Cell:
    """One mechanism at one ε, with the σ that gives it."""

    mechanism: str
    target: float
    config: TrainConfig

    @property
    def name(self) -> str:
        return f"{self.mechanism}-eps{self.target:g}"


@dataclass(frozen=True)
class Work:
    """One job of a worker: a tuning trial (result is a file) or a final run (result is a folder)."""

    kind: str
    cell: str
    seed: int
    index: int
    config: TrainConfig
    place: Path
    held_out: float = 0.0

    @property
    def result(self) -> dict[str, Any] | None:
        """What a finished job left; None if it has to be run."""
        path = self.place if self.kind != "final" else self.place / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else None


def compare(spec: Comparison, out: Path, pool: Pool | None = None, watch: Watch | None = None) -> dict[str, Any]:
    """Run what is not finished, and leave ``comparison.json`` in ``out``."""
    pool = pool or Pool()
    for mechanism in spec.mechanisms:  # before the records are read, which can take minutes
        require_known(spec.options(mechanism))
    data = load_data(spec.base)
    if data.x_test is None:
        raise ConfigError(
            f"data is {spec.base.data!r}, which has no public test set, and a comparison reads one for each final run: give a "
            "folder with train/CLASS and test/CLASS, or arrays with x_test and y_test"
        )
    out.mkdir(parents=True, exist_ok=True)
    _same_data(out, data)
    cells = plan(spec, data)
    runner = _searches if spec.accounted else _tuned_runs
    rows, trials, runs = runner(spec, cells, out, pool, watch)
    result = {
        "data": {"name": data.name, "records": len(data), "fingerprint": data.fingerprint()},
        "mechanisms": list(spec.mechanisms),
        "epsilons": list(spec.epsilons),
        "seeds": spec.seeds,
        "trials_per_cell": spec.trials,
        "held_out": spec.held_out,
        "accounted": spec.accounted,
        "covers": spec.words(),
        "rows": with_pairs(rows, spec.mechanisms[0]),
        "trials": trials,
        "runs": runs,
    }
    write_atomically(out / "comparison.json", (json.dumps(result, indent=2) + "\n").encode())
    return result


def plan(spec: Comparison, data: Dataset) -> list[Cell]:
    """Every cell with its σ. All are built once here, so that what cannot work fails before anything is trained."""
    cells = []
    for target in spec.epsilons:
        for mechanism in spec.mechanisms:
            config = dataclasses.replace(spec.options(mechanism), epsilon=target, noise_multiplier=None, seed=0)
            if spec.accounted:
                config = dataclasses.replace(config, epsilon=None, noise_multiplier=1.0)
            session = Session(config, data)
            settled, sigma = session.config, session.training.mechanism.noise_multiplier
            if spec.accounted:
                if session.training.mechanism.unsound:
                    raise ConfigError(f"no noise makes {mechanism!r} private: {session.training.mechanism.unsound}")
                assert settled.delta is not None
                sigma = tuning.calibrate(session.training.step_event, settled.steps, spec.trials, target, settled.delta)
            cells.append(
                Cell(mechanism, target, dataclasses.replace(settled, epsilon=None, noise_multiplier=sigma, seed=None))
            )
    return cells


# --- plain: tune, then run -----------------------------------------------------------------------------------------

Outcome = tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]


def _tuned_runs(spec: Comparison, cells: Sequence[Cell], out: Path, pool: Pool, watch: Watch | None) -> Outcome:
    jobs = [
        _job(
            "trial", cell.name, seed=k, index=k, config=tuning.setting(cell.config, place), out=out, held=spec.held_out
        )
        for cell in cells
        for k, place in enumerate(tuning.places(spec.trials))
    ]
    tried = _all(jobs, pool, watch, "tuning")
    final: dict[str, list[Work]] = {}
    for cell in cells:
        config = _chosen(cell.config, [tried[job.place] for job in jobs if job.cell == cell.name])
        final[cell.name] = [
            _job("final", cell.name, seed=s, index=s, config=config, out=out) for s in range(spec.seeds)
        ]
    done = _all([job for mine in final.values() for job in mine], pool, watch, "training")
    rows = []
    for cell in cells:
        summaries = [done[job.place] for job in final[cell.name]]
        accuracies = [float(s["test"]["test_accuracy"]) for s in summaries]
        guarantee = summaries[0]["guarantee"]
        rows.append(_row(cell, accuracies, guarantee["epsilon"], guarantee["delta"], final[cell.name][0].config))
    trials = [{"cell": job.cell, "trial": job.index, **tried[job.place]} for job in jobs]
    return rows, trials, [str(job.place.relative_to(out)) for mine in final.values() for job in mine]


def _chosen(config: TrainConfig, trials: list[dict[str, Any]]) -> TrainConfig:
    if not trials:
        return config
    won = tuning.best(trials)
    return dataclasses.replace(
        config, lr=won["lr"], max_grad_norm=won["max_grad_norm"], mechanism_options=won["mechanism_options"]
    )


# --- accounted: the search is the result ---------------------------------------------------------------------------


def _searches(spec: Comparison, cells: Sequence[Cell], out: Path, pool: Pool, watch: Watch | None) -> Outcome:
    jobs = [
        _job("search", cell.name, seed=seed, index=k, config=tuning.setting(cell.config, place), out=out, held=spec.held_out)
        for cell in cells
        for seed in range(spec.seeds)
        for k, place in enumerate(tuning.places(tuning.number_of_trials(spec.trials, seed), seed))
    ]  # fmt: skip
    tried = _all(jobs, pool, watch, "searching")
    rows = []
    for cell in cells:
        chosen = [
            tuning.best([tried[job.place] for job in jobs if (job.cell, job.seed) == (cell.name, seed)])
            for seed in range(spec.seeds)
        ]
        session = Session(dataclasses.replace(cell.config, seed=0), load_data(spec.base))
        assert cell.config.delta is not None
        spent = tuning.search_epsilon(session.training.event(), cell.config.steps, spec.trials, cell.config.delta)
        accuracies = [float(t["test"]["test_accuracy"]) for t in chosen]
        rows.append(_row(cell, accuracies, {"pld": None, "rdp": spent}, cell.config.delta, None))
    trials = [{"cell": job.cell, "seed": job.seed, "trial": job.index, **tried[job.place]} for job in jobs]
    return rows, trials, []


# --- jobs ----------------------------------------------------------------------------------------------------------


def _job(kind: str, cell: str, *, seed: int, index: int, config: TrainConfig, out: Path, held: float = 0.0) -> Work:
    """A job whose place names everything that decides its result: another option is another place."""
    config = dataclasses.replace(config, seed=1000 + 100 * seed + index if kind == "search" else seed)
    told = json.dumps([kind, json.loads(config.to_json()), held], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()[:8]
    label = {"trial": f"{cell}-trial{index}", "final": f"{cell}-seed{seed}"}.get(
        kind, f"{cell}-seed{seed}-trial{index}"
    )
    place = out / "runs" / f"{label}-{digest}" if kind == "final" else out / "tuning" / f"{label}-{digest}.json"
    return Work(kind, cell, seed, index, config, place, held)


def _all(jobs: Sequence[Work], pool: Pool, watch: Watch | None, what: str) -> dict[Path, dict[str, Any]]:
    """Results of all jobs; those with a result are not run again."""
    results = {job.place: job.result for job in jobs}
    open_jobs = [job for job in jobs if results[job.place] is None]
    if watch is not None and jobs:
        watch(what, len(jobs) - len(open_jobs), len(jobs))
    work = _remote if pool.cluster is not None else execute
    for job, result in pool.run(work, open_jobs):
        if pool.cluster is not None:
            _keep(job.place, result)
            result = job.result
        results[job.place] = result
        if watch is not None:
            watch(what, sum(r is not None for r in results.values()), len(jobs))
    return {place: result for place, result in results.items() if result is not None}


def execute(job: Work) -> dict[str, Any]:
    """Do one job and leave its result at its place, whole or not at all. A run that was cut short starts afresh."""
    if job.kind == "final":
        return train(job.config, job.place, overwrite=job.place.exists()).summary
    data = _data(job.config.to_json())
    result = tuning.trial(job.config, data, job.held_out, 0, job.place.stem, accounted=job.kind == "search")
    job.place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(job.place, (json.dumps(result) + "\n").encode())
    return result


def _remote(job: Work) -> dict[str, bytes]:
    """As `execute`, on a machine that need not share a disk with this one: the files come back."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / job.place.name
        execute(dataclasses.replace(job, place=place))
        files: Iterable[Path] = [p for p in place.rglob("*") if p.is_file()] if place.is_dir() else [place]
        return {str(p.relative_to(place)) if place.is_dir() else "": p.read_bytes() for p in files}


def _keep(place: Path, files: dict[str, bytes]) -> None:
    """The summary last: it says that the job is finished."""
    for name in sorted(files, key=lambda n: n == "summary.json"):
        target = place / name if name else place
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, files[name])


@lru_cache(maxsize=1)
def _read(source: str) -> Dataset:
    return load_data(TrainConfig.from_dict(json.loads(source)))


def _data(config: str) -> Dataset:
    """The data of a configuration, read once by a worker for all its jobs."""
    values = json.loads(config)
    for key in (
        "lr",
        "max_grad_norm",
        "mechanism",
        "mechanism_options",
        "model",
        "model_options",
        "seed",
        "noise_multiplier",
    ):
        values.pop(key)
    return _read(json.dumps({**values, "epsilon": 1.0}, sort_keys=True))


def _same_data(out: Path, data: Dataset) -> None:
    """A folder belongs to one data set: results on other records must not be mixed in."""
    path, mine = out / "data.txt", data.fingerprint()
    if path.exists() and path.read_text().strip() != mine:
        raise ConfigError(f"{out} holds a comparison on other data (its fingerprint differs); give another --out")
    path.write_text(mine + "\n")


def _row(
    cell: Cell, accuracies: list[float], spent: dict[str, Any], delta: float, config: TrainConfig | None
) -> dict[str, Any]:
    chosen = None
    if config is not None:
        chosen = {"lr": config.lr, "max_grad_norm": config.max_grad_norm, "mechanism_options": config.mechanism_options}
    return {
        "mechanism": cell.mechanism,
        "model": cell.config.model,
        "target_epsilon": cell.target,
        "epsilon": spent,
        "delta": delta,
        "noise_multiplier": cell.config.noise_multiplier,
        "accuracies": accuracies,
        "mean": statistics.fmean(accuracies),
        "std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "seeds": len(accuracies),
        "chosen": chosen,
    }


def with_pairs(rows: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Each row with its difference from the first mechanism at the same ε, seed by seed."""
    reference = {row["target_epsilon"]: row["accuracies"] for row in rows if row["mechanism"] == first}
    return [
        {**row, "against_first": None if row["mechanism"] == first else paired(row["accuracies"], reference[row["target_epsilon"]])}
        for row in rows
    ]  # fmt: skip
