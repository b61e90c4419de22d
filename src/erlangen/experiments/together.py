"""Runs of one small network that differ in seed, noise and mechanism, trained at once and kept as runs of their own."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import erlangen
from erlangen.accounting.words import in_json
from erlangen.data import Dataset, load
from erlangen.models import make_model
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.metrics import near_zero
from erlangen.training.public import predictions

#: runs that share a step: enough to fill a GPU, few enough for its memory
MEMBERS = 60


@dataclass(frozen=True)
class Job:
    """One run and the folder it leaves."""

    config: TrainConfig
    folder: Path

    def summary(self) -> dict[str, Any] | None:
        """What a finished run says; None if it is not finished."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None


def train_together(jobs: Sequence[Job], members: int = MEMBERS, dataset: Dataset | None = None) -> None:
    """Train all jobs, at most ``members`` at once; each leaves config.json, weights.safetensors and summary.json."""
    if not jobs:
        return
    dataset = load(jobs[0].config.data) if dataset is None else dataset
    parts = math.ceil(len(jobs) / members)
    for k in range(parts):
        part = jobs[k * len(jobs) // parts : (k + 1) * len(jobs) // parts]
        started = time.perf_counter()
        ensemble = Ensemble([job.config for job in part], dataset, run_ids=[job.folder.name for job in part])
        ensemble.run()
        scores = ensemble.evaluate()
        seconds = time.perf_counter() - started
        for member, job in enumerate(part):
            _keep(job, ensemble, member, scores[member], seconds / len(part))


def _keep(job: Job, ensemble: Ensemble, member: int, scores: dict[str, float], seconds: float) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    config = ensemble.configs[member]
    (job.folder / "config.json").write_text(config.to_json() + "\n")
    weights = ensemble.stack.state_dict(member, ensemble.weights())
    save_file({name: t.cpu().contiguous() for name, t in weights.items()}, str(job.folder / "weights.safetensors"))
    _keep_predictions(job.folder, config, ensemble.dataset, weights)
    mechanism, sampler = ensemble.mechanisms[member], ensemble.sampler
    spent = {method: ensemble.epsilon(member, method) for method in ("pld", "rdp")}
    summary = {
        "test": scores,
        "guarantee": {
            "epsilon": {method: in_json(e) for method, e in spent.items()},
            "delta": config.delta,
            "neighbouring": mechanism.neighbouring,
            "unit": "record",
            "sampler": sampler.describe(),
            "mechanism": mechanism.describe(),
            "steps": ensemble.step_count,
        },
        "data": {
            "name": ensemble.dataset.name, "records": len(ensemble.dataset), "fingerprint": ensemble.dataset.fingerprint(),
            "classes": ensemble.dataset.classes, "class_names": list(ensemble.dataset.class_names),
            "input_shape": list(ensemble.dataset.input_shape),
        },
        "parameters": ensemble.stack.flat.shape[1],
        "small_parameters": near_zero(weights.values()),
        "randomness": mechanism.noise.description,
        "non_private": [],
        "seconds": round(seconds, 2),
        "versions": {"erlangen": erlangen.__version__, "torch": torch.__version__},
    }  # fmt: skip
    (job.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _keep_predictions(folder: Path, config: TrainConfig, dataset: Dataset, weights: Mapping[str, Tensor]) -> None:
    """What a report needs of the public test set, as a run of its own leaves it."""
    if dataset.x_test is None or dataset.y_test is None:
        return
    device = next(iter(weights.values())).device
    model = make_model(config.model, dataset.input_shape, dataset.classes, **config.model_options).to(device)
    model.load_state_dict(weights)
    x, y = (torch.from_numpy(a).to(device) for a in (dataset.x_test, dataset.y_test))
    predictions(model, x, y).save(folder)
