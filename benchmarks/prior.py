"""What is a prior worth that was learnt from made-up images? Private training from it and from fresh weights, on held-out images.

    python benchmarks/prior.py --data mnist-1000@14 fashion_mnist-1000@14 shapes --out benchmarks/results/prior.json
    python benchmarks/prior.py --out benchmarks/results/prior.json --table

Data sets are those of `defaults.py`, and so is what is held out: a part of the *training* images; no test set is read. Both starts
get the network, batch, steps and noise that `erlangen train` chooses by itself, and the same rates: its own, a half and a quarter
of it. A prior is learnt once for each size of image, by the defaults of `erlangen prior`. The same command goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from defaults import held_out
from resumable import Budget, OutOfTime, Results
from scipy.stats import t as student

from erlangen.data import Dataset
from erlangen.models import make_model
from erlangen.prior import PriorOptions, learn_prior, save_prior
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

#: of the rate that a training chooses by itself
RATES = (1.0, 0.5, 0.25)
STARTS = ("fresh", "prior")


@dataclass(frozen=True)
class Trial:
    data: str
    epsilon: float
    seed: int
    start: str
    rate: float

    @property
    def given(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def family(self) -> str:
        return self.data


def trials(args: argparse.Namespace) -> Iterator[Trial]:
    """Seed by seed: everything is compared before anything is repeated."""
    for seed, data, epsilon, start, rate in itertools.product(range(args.seeds), args.data, args.epsilon, STARTS, RATES):
        yield Trial(data, epsilon, seed, start, rate)


def prior_for(data: Dataset, folder: Path, steps: int | None = None) -> str:
    """The file of the prior for these images; it is learnt where it is not there yet."""
    shape, options = data.input_shape, PriorOptions() if steps is None else PriorOptions(steps, images=64)
    path = folder / f"cnn-{'x'.join(map(str, shape))}-{options.steps}.safetensors"
    if not path.exists():
        started = time.perf_counter()
        torch.manual_seed(options.seed)
        model = learn_prior(make_model("cnn", shape, 2), shape, options)
        folder.mkdir(parents=True, exist_ok=True)
        save_prior(model, path, {})
        print(f"{path}: learnt in {time.perf_counter() - started:.0f} s", flush=True)
    return str(path)


def train(trial: Trial, data: Dataset, weights: str | None, steps: int | None = None) -> dict[str, Any]:
    unit = "patient" if data.unit is not None else None
    config = TrainConfig(epsilon=trial.epsilon, seed=trial.seed, unit=unit, device="cpu", steps=steps or 0, weights=weights)
    config = config.settled(data.unit_count)
    session = Session(dataclasses.replace(config, lr=trial.rate * config.lr), data)
    while session.step_count < session.config.steps:
        session.step()
    facts = {name: getattr(session.config, name) for name in ("batch", "steps", "lr", "delta")}
    return {**facts, "units": data.unit_count, "epsilon_pld": session.epsilon(), "accuracy": session.evaluate()["test_accuracy"]}


# -- the table ------------------------------------------------------------------------------------------------------


def by_rate(rows: list[dict[str, Any]]) -> dict[tuple[str, float], dict[str, dict[float, dict[int, float]]]]:
    """(data, ε) → start → rate → seed → held-out accuracy in %."""
    found: dict[tuple[str, float], dict[str, dict[float, dict[int, float]]]] = {}
    for row in rows:
        start = found.setdefault((row["data"], row["epsilon"]), {}).setdefault(row["start"], {})
        start.setdefault(row["rate"], {})[row["seed"]] = 100 * row["accuracy"]
    return found


def best(rates: dict[float, dict[int, float]]) -> float:
    return max(rates, key=lambda rate: mean(rates[rate].values()))


def interval(differences: list[float]) -> str:
    """Mean and half width of Student's 95 % interval."""
    if len(differences) < 2:
        return f"{differences[0]:+.1f}"
    width = student.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return f"{mean(differences):+.1f} ± {width:.1f}"


def gains(starts: dict[str, dict[float, dict[int, float]]], rates: dict[str, float]) -> list[float]:
    """Prior − fresh, seed by seed, each start at its rate."""
    fresh, prior = (starts[start].get(rates[start], {}) for start in STARTS)
    return [prior[seed] - fresh[seed] for seed in sorted(set(fresh) & set(prior))]


def table(rows: list[dict[str, Any]]) -> str:
    """Each start at the rate that is best for it, and what the prior gains there and where both have half the usual rate.

    The last line is the mean over the lines above it, with an interval over them.
    """
    units = {row["data"]: row["units"] for row in rows}
    lines = [
        "| data | N | ε | fresh | rate | prior | rate | gain, both at their best | gain, both at half the rate | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    every: list[tuple[float, float]] = []
    for (data, epsilon), starts in sorted(by_rate(rows).items(), key=lambda item: (units[item[0][0]], item[0])):
        if set(starts) != set(STARTS):
            continue
        chosen = {start: best(rates) for start, rates in starts.items()}
        fresh, prior = (starts[start][chosen[start]] for start in STARTS)
        own, half = gains(starts, chosen), gains(starts, dict.fromkeys(STARTS, 0.5))
        every.append((mean(own), mean(half)))
        cells = [
            data, f"{units[data]:,}", f"{epsilon:g}", f"{mean(fresh.values()):.1f}", f"{chosen['fresh']:g}",
            f"{mean(prior.values()):.1f}", f"{chosen['prior']:g}", interval(own), interval(half), str(len(own)),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    if len(every) > 1:
        ends = " | ".join(interval(list(column)) for column in zip(*every, strict=True))
        lines.append(f"| **all {len(every)}** | | | | | | | {ends} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=[], help="digits, shapes, or NAME-RECORDS[@SIDE]")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--priors", type=Path, default=Path("build/priors"), help="folder of the priors")
    parser.add_argument("--steps", type=int, help="of priors and trainings, to try the script")
    parser.add_argument("--budget", type=float, default=math.inf, help="begin no training after so many seconds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print it, and train nothing")
    args = parser.parse_args()
    results, budget = Results(args.out, {"runs": ("data", "epsilon", "seed", "start", "rate")}), Budget(args.budget)
    if args.table:
        print(table(results.rows("runs")))
        return
    results.hold({"steps": args.steps, "prior": dataclasses.asdict(PriorOptions())}, unsaid={})
    loaded: dict[str, Dataset] = {}
    try:
        for trial in results.left("runs", trials(args)):
            budget.check()
            data = loaded[trial.data] = loaded.get(trial.data) or held_out(trial.data)
            weights = prior_for(data, args.priors, args.steps) if trial.start == "prior" else None
            row = {**trial.given, **train(trial, data, weights, args.steps)}
            results.keep("runs", [row], torch=torch.__version__, device="cpu")
            name = f"{trial.data} ε={trial.epsilon:g} {trial.start} ×{trial.rate:g} seed {trial.seed}"
            print(f"{name}: {row['accuracy']:.1%}", flush=True)
    except OutOfTime:
        print("out of time: run the same command again")


if __name__ == "__main__":
    main()
