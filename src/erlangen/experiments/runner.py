"""Runs a preset: every cell, every seed, results beside the paper's numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from erlangen.accounting.ledger import LedgerError, read_ledger
from erlangen.data import Dataset
from erlangen.experiments.measurements import Measurement, run_measurement
from erlangen.experiments.pool import Pool
from erlangen.experiments.presets import Cell, Preset, presets
from erlangen.experiments.together import Job, train_together
from erlangen.training import checkpoint
from erlangen.training.built import load_data
from erlangen.training.config import TrainConfig
from erlangen.training.folder import stream_id
from erlangen.training.metrics import near_zero
from erlangen.training.run import resume, train

Watch = Callable[[str, int, dict[str, Any]], None]


@dataclass(frozen=True)
class Work:
    """One run of a cell, as a process of its own can do it."""

    key: tuple[str, int]
    job: Job
    preset: Preset


def run_preset(
    preset: Preset | Measurement, out: Path, first_seed: int = 0, watch: Watch | None = None, workers: int = 1
) -> dict[str, Any]:
    """Finished runs in ``out`` are kept and a run that was stopped is resumed, so that a table goes on where it was.

    So many ``workers`` train runs side by side, on a GPU all on the same one. What a run releases does not depend on it.
    """
    if isinstance(preset, Measurement):
        return run_measurement(preset, out, first_seed, watch)
    configs = {cell.name: cell.resolved(preset.records) for cell in preset.cells}
    jobs = {
        (cell.name, seed): Job(dataclasses.replace(configs[cell.name], seed=seed), out / _folder(cell.name, seed))
        for cell in preset.cells
        for seed in range(first_seed, first_seed + preset.seeds * cell.seed_factor)
    }
    open_jobs = [job for job in jobs.values() if job.summary() is None]
    if preset.together and open_jobs:
        train_together(open_jobs, dataset=_shortened(load_data(open_jobs[0].config), preset))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for key, summary in _summaries(jobs, preset, workers):
        found[key] = summary
        if watch is not None:
            watch(*key, summary)
    summaries = {key: found[key] for key in jobs}  # in the order of the table, whoever was first
    rows = []
    for cell in preset.cells:
        mine = {key: summary for key, summary in summaries.items() if key[0] == cell.name}
        row = _row(cell, list(mine.values()), [_value(cell, jobs[key], s) for key, s in mine.items()])
        rows.append({**row, **_curve(cell, [jobs[key] for key in mine])})
    values = {row["cell"]: row["values"] for row in rows}
    for cell, row in zip(preset.cells, rows, strict=True):
        row["paired"] = {other: paired(row["values"], values[other]) for other in cell.against if other in values}
    result = {"preset": preset.name, "paper": preset.paper, "title": preset.title, "note": preset.note, "rows": rows}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _folder(name: str, seed: int) -> str:
    return f"{name.lower().replace(' ', '-').replace('/', '-')}-seed{seed}"


def _summaries(
    jobs: dict[tuple[str, int], Job], preset: Preset, workers: int
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """What every run says: first those that are finished, then the others as they come."""
    left = []
    for key, job in jobs.items():
        summary = job.summary()
        if summary is None:
            left.append(Work(key, job, dataclasses.replace(preset, cells=())))
        else:
            yield key, summary
    pool = Pool(workers, threads=max(1, torch.get_num_threads() // workers))
    try:
        for work, summary in pool.run(_train, left):
            yield work.key, summary
    finally:
        _SHELF.clear()


#: the data of the last cell: cells of one data set follow each other, and it is read once
_SHELF: dict[str, Dataset] = {}


def _train(work: Work) -> dict[str, Any]:
    presets()  # in a new process: makes the data of the tables known
    config, folder = work.job.config, work.job.folder
    wanted = json.dumps([config.data, config.unit, config.data_options], sort_keys=True)
    if wanted not in _SHELF:
        _SHELF.clear()
        _SHELF[wanted] = _shortened(load_data(config), work.preset)
    data = _SHELF[wanted]
    if _stopped(folder, dataclasses.replace(config, data=data.name), data):
        return resume(folder, dataset=data, device=config.device, max_physical_batch=config.max_physical_batch).summary
    return train(config, folder, overwrite=folder.exists(), dataset=data).summary


def _stopped(folder: Path, config: TrainConfig, data: Dataset) -> bool:
    """Whether this run was stopped here between two steps: going on gives what a whole run gives. After a crash it is made
    anew, because what its ledger had reserved is spent."""
    try:
        book, state = read_ledger(folder / "ledger.jsonl"), checkpoint.load(folder / "checkpoint.safetensors")
    except (OSError, LedgerError, checkpoint.CheckpointError):
        return False
    return book.settled and book.steps == state.get("step") and book.header.get("streams") == stream_id(config, data)


def _shortened(data: Dataset, preset: Preset) -> Dataset:
    """The first records, where a preset asks for some only."""
    if preset.train_records is not None:
        data = dataclasses.replace(
            data, x_train=data.x_train[: preset.train_records], y_train=data.y_train[: preset.train_records]
        )
    if preset.test_records is None or data.x_test is None or data.y_test is None:
        return data
    return dataclasses.replace(data, x_test=data.x_test[: preset.test_records], y_test=data.y_test[: preset.test_records])


def _value(cell: Cell, job: Job, summary: dict[str, Any]) -> float:
    """The cell's measure of one run: a public test metric, or the share of small parameters among the released ones."""
    scale = 100 if cell.unit.endswith("%") else 1
    if cell.measure == "small_parameters":
        return scale * near_zero(load_file(str(job.folder / "weights.safetensors")).values())
    return scale * float(summary["test"][cell.measure])


def _curve(cell: Cell, jobs: list[Job]) -> dict[str, Any]:
    """The measure and the run's own ε at every evaluation, over seeds; nothing where a cell does not ask for it."""
    if not cell.curve:
        return {}
    scale = 100 if cell.unit.endswith("%") else 1
    logs = [[json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()] for job in jobs]
    points = []
    for together in zip(*logs):  # seeds of one cell are evaluated at the same steps
        values = [scale * float(each[cell.measure]) for each in together]
        spread = statistics.stdev(values) if len(values) > 1 else None
        own = together[0]
        points.append({"step": own["step"], "epsilon": own["epsilon"], "mean": statistics.fmean(values), "std": spread})
    return {"curve": points, "paper_first": cell.paper_first}


def paired(values: list[float], others: list[float]) -> dict[str, Any]:
    """The mean difference over common seeds and the half width of its 95 % interval (Student's t)."""
    from scipy.stats import t

    gaps = [a - b for a, b in zip(values, others)]  # seeds are counted from the same first one
    n = len(gaps)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(gaps) / math.sqrt(n) if n > 1 else None
    return {"mean": statistics.fmean(gaps), "half_width_95": half, "seeds": n}


def _row(cell: Cell, summaries: list[dict[str, Any]], values: list[float]) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "paper": cell.paper,
        "claimed_epsilon": cell.claimed_epsilon,
        "unit": cell.unit,
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "values": values,
        "epsilon": summaries[0]["guarantee"]["epsilon"],
        "delta": summaries[0]["guarantee"]["delta"],
    }
