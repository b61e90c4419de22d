"""A dry run: what a large-batch private run would reach, from one with 1/k of its batch (after Sander et al. 2023, TAN).

A step adds noise of std σC/B per coordinate to the mean of B clipped gradients. Divide B and σ by the same k and leave the
steps and everything else alone: the noise is the same, the signal is the same, only the sampling error of the mean is
larger. With d parameters the noise has energy dσ²C²/B², the sampling error at most kC²/B; so the small run stands in for
the large one while

    dominance = d·σ²/(k·B)

is well above 1, at 1/k of the work. What does *not* stay is privacy: with σ/k in place of σ a dry run costs far more than
the run that it stands for. It is a run like any other: its own ledger and certificate say its own, true ε, and whoever
does it on the records that the large run will see pays for both. Do it on public data of the same kind.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from erlangen.accounting import epsilon
from erlangen.accounting.words import in_json, upper
from erlangen.data import Dataset
from erlangen.training.built import load_data, require_known
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import write
from erlangen.training.normalise import wants_private
from erlangen.training.run import train
from erlangen.training.session import Session

#: below this the small run's sampling error is no longer small beside the noise
SAFE = 4.0


@dataclass(frozen=True)
class Plan:
    """A large run and the small one that stands for it. ``epsilon`` is what one run of each kind costs."""

    k: float
    target: TrainConfig
    small: TrainConfig
    noise_to_batch: float
    dominance: float
    target_epsilon: float
    small_epsilon: float

    @property
    def remarks(self) -> list[str]:
        """What has to be said before anybody uses the prediction."""
        said = [
            f"a dry run is not the private run: on the same records each one costs ε = {upper(self.small_epsilon, 3)} by itself, "
            f"the run they stand for ε = {upper(self.target_epsilon, 3)}; all of them count. Use public data of the same kind"
        ]
        if self.dominance < SAFE:
            said.append(
                f"dominance d·σ²/(k·B) is {self.dominance:.2g}: at k = {self.k:g} sampling error is no longer small beside "
                f"the noise, and the prediction is likely too low; use k ≤ {max(1.0, self.k * self.dominance / SAFE):.2g}"
            )
        return said


@dataclass(frozen=True)
class Prediction:
    """Test accuracy of the small runs, which is the prediction for the large one, with its spread over seeds."""

    plan: Plan
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 with one seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        facts = {k: v for k, v in asdict(self.plan).items() if k not in ("target", "small")}
        finite = {k: in_json(v) if isinstance(v, float) else v for k, v in facts.items()}
        return {
            **finite, "predicted_accuracy": self.mean, "spread": self.spread, "accuracies": list(self.accuracies),
            "target": json.loads(self.plan.target.to_json()), "small": json.loads(self.plan.small.to_json()),
            "remarks": self.plan.remarks,
        }  # fmt: skip


def plan(config: TrainConfig, k: float, dataset: Dataset | None = None) -> Plan:
    """The small run for a configuration; σ of the large one is calibrated if the configuration gives ε."""
    if not (math.isfinite(k) and k > 1):
        raise ConfigError(f"k is {k}; a dry run divides batch and noise by a number above 1")
    if wants_private(config):
        raise ConfigError(
            "normalise is 'private': a dry run would take the constants without a ledger that counts them. Give public constants "
            "(normalise=MEAN/STD), and let the run itself release its own"
        )
    session = Session(config, dataset)
    target, mechanism = session.config, session.training.mechanism
    sigma, batch = mechanism.noise_multiplier, session.sampler.expected_batch
    if sigma == 0:
        raise ConfigError("noise_multiplier is 0: without noise there is no noise-to-batch ratio to keep")
    if batch / k < 1:
        raise ConfigError(f"k is {k} but the batch is {batch:g}: give k ≤ {batch:g}, so that somebody is in the small batch")
    small = replace(target, batch=batch / k, noise_multiplier=sigma / k, epsilon=None)
    assert target.delta is not None
    large_cost = epsilon([(session.training.event(), target.steps)], target.delta)
    small_session = Session(small, session.dataset)
    small_cost = epsilon([(small_session.training.event(), small.steps)], target.delta)
    d = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
    return Plan(k, target, small, sigma / batch, d * sigma**2 / (k * batch), large_cost, small_cost)


def dry_run(
    config: TrainConfig, k: float, seeds: Sequence[int] = (0,), out: str | Path | None = None,
    progress: Callable[[int, float], None] = lambda seed, accuracy: None,
) -> Prediction:  # fmt: skip
    """Train the small run once for each seed. With ``out`` each leaves its folder, ledger and certificate there."""
    if not seeds:
        raise ConfigError("seeds is empty; give at least one")
    require_known(config)  # before the records are read, which can take minutes
    dataset = load_data(config)
    if dataset.x_test is None:
        raise ConfigError(f"{config.data} has no public test set, so there is no accuracy to predict; add x_test and y_test")
    made = plan(config, k, dataset)
    accuracies = []
    for seed in seeds:
        chosen = replace(made.small, seed=None if made.small.secure else seed)
        folder = None if out is None else Path(out) / f"dry-run-{seed}"
        accuracies.append(train(chosen, folder).summary["test"]["test_accuracy"])
        progress(seed, accuracies[-1])
    result = Prediction(made, tuple(accuracies))
    if out is not None:
        write(Path(out) / "tan.json", json.dumps(result.to_json(), indent=2) + "\n")
    return result
