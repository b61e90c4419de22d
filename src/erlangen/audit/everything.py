"""`erlangen audit all`: the table of every mechanism, runs, the static audit, the zoo, and how far all that can be trusted.

The work is a list of independent tasks, so that several processes can share it. The result does not depend on how many, nor on
whether the sweep was stopped in between (`kept`).
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from erlangen import plugins
from erlangen.audit import static, trust
from erlangen.audit.kept import Kept
from erlangen.audit.table import Entry, Tell, audit_entry, audit_opacus, wanted
from erlangen.audit.verdict import CONFIDENCE, INCONCLUSIVE, VIOLATED, Finding, corrected, jsonable, unable

#: repetitions of the Monte Carlo audit of something sound in one task
CHUNK = 25


@dataclass(frozen=True)
class Row:
    entry: Entry
    finding: Finding


@dataclass(frozen=True)
class Everything:
    """What `erlangen audit all` produces."""

    rows: list[Row]
    runs: list[Finding]
    static: list[Finding]
    zoo: list[dict[str, Any]]
    power: list[dict[str, float]]
    false_alarms: list[dict[str, Any]]
    opacus: list[Finding]

    @property
    def own(self) -> list[Finding]:
        """What this library itself claims."""
        return [row.finding for row in self.rows if row.entry.claimed_by == "erlangen"] + self.static

    @property
    def trustworthy(self) -> bool:
        """Every broken specimen caught, every sound one passed."""
        return all(bool(s["bug"]) == bool(s["caught_by"]) for s in self.zoo)

    @property
    def failed(self) -> bool:
        return any(f.verdict == VIOLATED for f in [*self.own, *self.runs]) or not self.trustworthy

    @property
    def incomplete(self) -> bool:
        return any(f.verdict == INCONCLUSIVE for f in self.own)

    def to_json(self) -> dict[str, Any]:
        rows = [{"paper": r.entry.paper, "claimed_by": r.entry.claimed_by, **r.finding.to_json()} for r in self.rows]
        return jsonable({
            "verdict": VIOLATED if self.failed else INCONCLUSIVE if self.incomplete else "consistent",
            "mechanisms": rows, "runs": [f.to_json() for f in self.runs], "static": [f.to_json() for f in self.static],
            "zoo": self.zoo, "power": self.power,
            "false_alarms": self.false_alarms, "opacus": [f.to_json() for f in self.opacus], "confidence": CONFIDENCE,
        })  # fmt: skip


# --- tasks -----------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "ISO": {"model": "logistic"},
    "GeoDP": {"model": "logistic", "mechanism": "geodp"},
    "Clipless": {"mechanism": "clipless"},
    "Clipless, LeNet": {
        "model": "lipschitz-lenet", "model_options": {"width": 4}, "mechanism": "clipless",
        "mechanism_options": {"loss": "cross-entropy"},
    },
}  # fmt: skip


def audit_run(name: str, scale: float, seed: int, tell: Tell) -> list[Finding]:
    """A short run on the embedded digits with canaries in it: gradients, records for Clipless, and mislabelled images."""
    from erlangen.audit import canaries, membership
    from erlangen.training.config import TrainConfig
    from erlangen.training.session import Session

    common: dict[str, Any] = {"epsilon": None, "noise_multiplier": 1.0, "batch": 128, "ema": 0.0, "seed": seed}
    steps = max(30, int(100 * scale))
    label, told = f"{name}, {steps} steps", partial(tell, f"run: {name}")
    try:
        config = TrainConfig(**{**common, **RUNS[name], "steps": steps})
        session = Session(config, run_id=f"audit-{name}-{seed}")
        found = canaries.audit_run(session, label, run=300, seed=seed, progress=told)
        return [*found, membership.audit_session(config, label, canaries=200, seed=seed, progress=told)]
    except Exception as error:
        return [unable(label, "run", f"{type(error).__name__}: {error}")]


def audit_specimen(k: int) -> dict[str, Any]:
    """What is wrong with a specimen, and which audits called it violated."""
    from erlangen.audit.zoo import examine, zoo

    specimen = zoo()[k]
    caught = [f.audit for f in examine(specimen) if f.verdict == VIOLATED]
    return {"name": specimen.name, "kind": specimen.kind, "bug": specimen.bug, "caught_by": caught}


@dataclass(frozen=True)
class Task:
    """A share of the work: what of, which one, and how much."""

    part: str
    which: Any
    scale: float
    seed: int

    @property
    def key(self) -> str:
        """Whatever decides the result, but for the sources."""
        return f"{self.part} {self.which} scale {self.scale:g} seed {self.seed}"

    def __call__(self, tell: Tell = lambda what, done, total: None) -> Any:
        which, scale, seed = self.which, self.scale, self.seed
        if self.part == "rows":
            return audit_entry(wanted()[which], scale, seed, tell)
        if self.part == "runs":
            return audit_run(which, scale, seed, tell)
        if self.part == "static":
            return static.audit_part(which, lambda name: tell(f"static: {name}", 0, 1))
        if self.part == "zoo":
            return audit_specimen(which)
        if self.part == "power":
            return trust.power_at(which, 20 if scale < 0.5 else 40, seed=seed)
        if self.part == "alarms":
            return trust.alarms(range(CHUNK * which, CHUNK * (which + 1)))
        if self.part == "randomness":
            return trust.false_alarms_of_randomness(50 if scale < 0.5 else 100)
        return audit_opacus(trials=1500 if scale < 0.5 else 6000)


def tasks(scale: float, seed: int) -> Iterator[Task]:
    """The longest first."""
    from erlangen.audit.zoo import zoo

    small = scale < 0.5
    parts: dict[str, Any] = {
        "runs": list(RUNS),
        "rows": range(len(wanted())),
        "static": range(len(static.PARTS)),
        "alarms": range(4 if small else 8),
        "randomness": [0],
        "opacus": [0] if importlib.util.find_spec("opacus") is not None else [],
        "power": trust.TRUTHS,
        "zoo": range(len(zoo())),
    }
    for part, every in parts.items():
        for which in every:
            yield Task(part, which, scale, seed)


def audit_everything(
    scale: float = 1.0, seed: int = 0, tell: Tell = lambda what, done, total: None, jobs: int = 1, keep: Path | None = None
) -> Everything:  # fmt: skip
    """The whole sweep. ``keep`` is a file of finished tasks: those in it are not done again, and every new one is added."""
    todo, kept = list(tasks(scale, seed)), Kept(keep)
    done = _alone(todo, tell, kept) if jobs == 1 else _shared(todo, tell, jobs, kept)
    of: Callable[[str], list[Any]] = lambda part: [r for task, r in zip(todo, done) if task.part == part]  # noqa: E731
    joined: Callable[[str], list[Any]] = lambda part: list(chain.from_iterable(of(part)))  # noqa: E731
    rows = [Row(entry, finding) for entry, finding in zip(wanted(), corrected(of("rows")))]
    alarms = of("alarms")
    return Everything(
        rows, corrected(joined("runs")), corrected(joined("static")), of("zoo"), of("power"),
        [trust.monte_carlo_rate(sum(alarms), CHUNK * len(alarms)), *joined("randomness")], joined("opacus"),
    )  # fmt: skip


def _alone(todo: list[Task], tell: Tell, kept: Kept) -> list[Any]:
    for k, task in enumerate(todo):
        tell(f"{task.part} {k + 1} of {len(todo)}", 0, 1)
        if task not in kept:
            kept.add(task, *timed(task, tell))
    return [kept[task] for task in todo]


def _shared(todo: list[Task], tell: Tell, jobs: int, kept: Kept) -> list[Any]:
    """By ``jobs`` fresh processes: a forked one would share the threads and the random state of this one."""
    missing = [task for task in todo if task not in kept]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), plugins.load) as pool:
        futures = {pool.submit(timed, task): task for task in missing}
        for count, future in enumerate(as_completed(futures)):
            kept.add(futures[future], *future.result())
            tell("tasks", len(todo) - len(missing) + count + 1, len(todo))
    return [kept[task] for task in todo]


def timed(task: Task, tell: Tell = lambda what, done, total: None) -> tuple[Any, float]:
    start = time.perf_counter()
    return task(tell), time.perf_counter() - start
