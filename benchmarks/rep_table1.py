r"""ISO, SHUFFLE and REP on rotated MNIST at five noise levels, many seeds at once (REP paper, Table 1 and Figures 1, 2).

    python benchmarks/rep_table1.py --data FOLDER --out table1.json --tune --budget 1100
    python benchmarks/rep_table1.py --data FOLDER --out table1.json --tune --budget 1100 --resume     # goes on
    python benchmarks/rep_table1.py --data FOLDER --out metrics.json --tune --sigmas 1.0 \
        --mechanisms iso,shuffle,rep,rep:paper,rep:escnn:0.5          # metrics beside each other, with their powers

FOLDER holds mnist.npz (or fashion_mnist.npz). Learning rate and clipping bound are tuned on a split of the *training*
set, with the same grid for every mechanism, at one noise level; then every cell is trained on all of it and the test
set is read once. Needs torch and numpy; ε is left out where dp_accounting is not installed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from resumable import Bench, OutOfTime, Row, held_out
from scipy.stats import t

from erlangen.atomic import write_atomically
from erlangen.data import load
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.metrics import near_zero

#: σ → test accuracy of ISO, SHUFFLE and REP in the paper's Table 1; its Figure 2 (Fashion-MNIST) prints no numbers
PAPER = {
    1.4: (46.3, 45.7, 44.2), 1.2: (46.9, 51.8, 52.9), 1.0: (68.0, 60.9, 72.1), 0.8: (84.9, 84.9, 85.2),
    0.6: (89.9, 89.7, 89.9),
}  # fmt: skip
ORDER = ("iso", "shuffle", "rep")
#: steps between two looks at the clock
CHUNK = 512


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", required=True, help="folder with mnist.npz")
    add("--dataset", default="rotated_mnist")
    add("--sigmas", type=numbers, default=[1.0, 1.2, 0.8, 1.4, 0.6], help="in the order in which they are run")
    add("--mechanisms", default="iso,shuffle,rep", help="a metric and a power may follow: rep:paper, rep:escnn:0.5")
    add("--seeds", type=int, default=5)
    add("--many-seeds", type=int, default=20, help="at the noise levels of --many")
    add("--many", type=numbers, default=[1.0, 1.2])
    add("--steps", type=int, default=18_760)
    add("--batch", type=float, default=60_000 / 938, help="expected; the paper's ε belong to a rate of 1/938")
    add("--lr", type=numbers, default=[0.25], help="one, or the grid for --tune")
    add("--clip", type=numbers, default=[1.0], help="one, or the grid for --tune")
    add("--momentum", type=float, default=0.0)
    add("--ema", type=float, default=0.999)
    add("--schedule", default="constant", choices=["constant", "cosine"])
    add("--metric", default="escnn")
    add("--power", type=float, default=1.0)
    add("--fields", default="4,8,16", help="fields per layer of the C8 network")
    add("--head-pool", default="max", choices=["max", "avg"])
    add("--members", type=int, default=60, help="runs trained at once")
    add("--precision", default="bf16", choices=["bf16", "fp32"])
    add("--tune", action="store_true", help="choose learning rate and clip per mechanism on a split of the training set")
    add("--tune-sigma", type=float, default=1.0)
    add("--tune-steps", type=int, default=None, help="default: --steps")
    add("--tune-seeds", type=int, default=1)
    add("--tune-only", action="store_true")
    add("--budget", type=float, default=math.inf, help="seconds after which everything is saved and the script ends")
    add("--resume", action="store_true")
    add("--no-graph", action="store_true", help="launch kernels one by one")
    add("--device", default="auto")
    add("--out", type=Path, required=True)
    return parser.parse_args()


@dataclass(frozen=True)
class Cell:
    """One run; of a trial the seed is 1000 or more."""

    mechanism: str
    sigma: float
    seed: int
    lr: float
    clip: float
    steps: int

    #: one network: all of them train together
    family = "c8-cnn"

    @property
    def given(self) -> Row:
        return asdict(self)


#: options that neither a row nor its name says
COMMON = ("dataset", "batch", "momentum", "ema", "schedule", "metric", "power", "fields", "head_pool", "precision")


class Table1(Bench[Cell]):
    phases: ClassVar = {"runs": ("sigma", "mechanism", "seed"), "tuning": ("mechanism", "lr", "clip", "seed")}

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, options.resume)
        settings = {k: str(v) for k, v in vars(options).items()}
        self.results.hold({k: settings[k] for k in COMMON}, unsaid=self.results.content.get("settings", {}))
        self.results.content["settings"] = settings
        self.dataset = load(options.dataset)
        self.mechanisms = options.mechanisms.split(",")
        self.paused = options.out.with_suffix(".pt")
        self.graph = self.graph and self.graph_works()
        self.costs: dict[tuple[str, float], dict[str, float] | None] = {}

    def graph_works(self) -> bool:
        """A few steps without noise, replayed and launched one by one, must give the same weights."""
        if not torch.cuda.is_available() or self.options.device == "cpu":
            return False
        configs = [self.config(Cell(m, 0.0, seed, 0.1, 1.0, 24)) for seed, m in enumerate(ORDER)]
        try:
            pair = [Ensemble(configs, self.dataset, graph=graph, rows=64) for graph in (True, False)]
            for ensemble in pair:
                ensemble.run()
            gap = float((pair[0].stack.flat - pair[1].stack.flat).abs().max())
        except RuntimeError as error:
            print(f"CUDA graphs do not work here ({error}); launching one by one")
            return False
        print(f"CUDA graph against single launches: weights differ by {gap:.1e} after 24 steps")
        return gap < 1e-2

    def config(self, cell: Cell) -> TrainConfig:
        o = self.options
        name, metric, power = (*cell.mechanism.split(":"), "", "")[:3]
        facts: dict[str, Any] = {} if name == "iso" else {"metric": metric or o.metric, "power": float(power or o.power)}
        if name == "shuffle":
            facts["seed"] = cell.seed
        counts = tuple(int(n) for n in o.fields.split(","))
        return TrainConfig(
            data=o.dataset, model="c8-cnn", model_options={"field_counts": counts, "head_pool": o.head_pool},
            mechanism=name, mechanism_options=facts, max_grad_norm=cell.clip, epsilon=None,
            noise_multiplier=cell.sigma, delta=1e-5, batch=o.batch, steps=cell.steps, lr=cell.lr, momentum=o.momentum,
            ema=o.ema, schedule=o.schedule, seed=cell.seed, device=o.device,
        )  # fmt: skip

    # -- running --------------------------------------------------------------------------------------------------

    def train(self, phase: str, trials: list[Cell]) -> list[Row]:
        """All of them at once; out of time, the state is kept in a file beside the results."""
        configs = [self.config(cell) for cell in trials]
        # members with the same seed share their first weights and their batches: comparisons are paired
        ensemble = Ensemble(
            configs, held_out(self.dataset) if phase == "tuning" else self.dataset, graph=self.graph,
            run_ids=[f"seed{c.seed}" for c in configs], precision=torch.bfloat16 if self.options.precision == "bf16" else None,
        )  # fmt: skip
        key = [c.to_json() for c in configs]
        if self.options.resume and self.paused.exists():
            saved = torch.load(self.paused, map_location=ensemble.device, weights_only=False)
            if saved["key"] == key:
                saved["state"]["noise"] = saved["state"]["noise"].cpu()
                ensemble.load_state_dict(saved["state"])
        started, first = time.perf_counter(), ensemble.step_count
        while ensemble.step_count < ensemble.config.steps:
            if self.budget.left() < 5:
                buffer = io.BytesIO()
                torch.save({"key": key, "state": ensemble.state_dict()}, buffer)
                write_atomically(self.paused, buffer.getvalue())
                raise OutOfTime
            ensemble.run(CHUNK)
            if ensemble.device.type == "cuda":
                torch.cuda.synchronize()
            each = (time.perf_counter() - started) / (ensemble.step_count - first)
            print(f"\r{len(configs)} runs: step {ensemble.step_count}, {1e3 * each:.2f} ms a step", end="", flush=True)
        print()
        self.paused.unlink(missing_ok=True)
        return [
            {"epsilon": self.cost(phase, ensemble, k), "delta": configs[k].delta, **scores, "small_parameters": near_zero([w])}
            for k, (scores, w) in enumerate(zip(ensemble.evaluate(), ensemble.weights(), strict=True))
        ]

    def cost(self, phase: str, ensemble: Ensemble, member: int) -> dict[str, float] | None:
        """ε by both accountants, once per noise level: the held-out records change the sampling rate, the seed does not."""
        sigma = ensemble.configs[member].noise_multiplier
        assert sigma is not None
        if (phase, sigma) not in self.costs:
            try:
                self.costs[phase, sigma] = {m: ensemble.epsilon(member, m) for m in ("rdp", "pld")}
            except ImportError:
                self.costs[phase, sigma] = None
        return self.costs[phase, sigma]

    def summary(self, content: Row) -> Row:
        return {"table": table(content["runs"], PAPER if self.options.dataset == "rotated_mnist" else {})}

    # -- the two phases -------------------------------------------------------------------------------------------

    def tune(self) -> dict[str, tuple[float, float]]:
        """The learning rate and clip of every mechanism with the best accuracy on held-out *training* records."""
        o = self.options
        seeds, steps = range(1000, 1000 + o.tune_seeds), o.tune_steps or o.steps
        grid = itertools.product(self.mechanisms, o.lr, o.clip, seeds)
        self.run("tuning", [Cell(m, o.tune_sigma, seed, lr, clip, steps) for m, lr, clip, seed in grid])
        rows = self.results.rows("tuning")

        def mean(m: str, lr: float, c: float) -> float:
            return statistics.fmean(
                r["test_accuracy"] for r in rows if (r["mechanism"], r["lr"], r["clip"]) == (m, lr, c)
            )

        best: dict[str, tuple[float, float]] = {}
        for m in self.mechanisms:
            lr, clip = best[m] = max(itertools.product(o.lr, o.clip), key=lambda pick: mean(m, *pick))
            print(f"{m}: lr {lr}, clip {clip}, held-out accuracy {100 * mean(m, lr, clip):.2f}")
        return best

    def work(self) -> None:
        o = self.options
        best = self.tune() if o.tune else dict.fromkeys(self.mechanisms, (o.lr[0], o.clip[0]))
        if not o.tune_only:
            self.run("runs", [
                Cell(m, sigma, seed, lr, clip, o.steps)
                for sigma in o.sigmas for seed in range(o.many_seeds if sigma in o.many else o.seeds)
                for m, (lr, clip) in best.items()
            ])  # fmt: skip

    def finish(self) -> None:
        super().finish()
        show(self.results.content["table"])


def table(runs: list[Row], paper: Mapping[float, Sequence[float]]) -> list[Row]:
    """Mean ± standard error per cell; what every REP is better than ISO and SHUFFLE by, over common seeds, with Student's
    95 % intervals."""
    found = dict.fromkeys(r["mechanism"] for r in runs)
    names = [*(m for m in ORDER if m in found), *(m for m in found if m not in ORDER)]
    rows = []
    for sigma in sorted({r["sigma"] for r in runs}, reverse=True):
        here = [r for r in runs if r["sigma"] == sigma]
        accuracy = {m: {r["seed"]: 100 * r["test_accuracy"] for r in here if r["mechanism"] == m} for m in names}
        published = dict(zip(ORDER, paper.get(sigma, ()), strict=False))
        row: Row = {"sigma": sigma, "epsilon": here[0]["epsilon"], "cells": {}}
        for m, values in accuracy.items():
            if values:
                error = statistics.stdev(values.values()) / math.sqrt(len(values)) if len(values) > 1 else None
                row["cells"][m] = {
                    "mean": statistics.fmean(values.values()), "error": error, "seeds": len(values), "paper": published.get(m),
                }  # fmt: skip
        for ours, other in itertools.product((m for m in names if m.startswith("rep")), ("iso", "shuffle")):
            theirs = accuracy.get(other, {})
            gaps = [accuracy[ours][s] - theirs[s] for s in accuracy[ours] if s in theirs]
            if len(gaps) > 1:
                half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
                row[f"{ours}-{other}"] = {"mean": statistics.fmean(gaps), "half_width_95": half, "pairs": len(gaps)}
        rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        cells = []
        for m, c in row["cells"].items():
            published = "" if c["paper"] is None else f"; paper {c['paper']}"
            cells.append(f"{m} {c['mean']:.2f} ± {c['error'] or 0:.2f} ({c['seeds']} seeds{published})")
        for m in row["cells"]:
            if gap := row.get(f"{m}-iso"):
                cells.append(f"{m} − iso {gap['mean']:+.2f} ± {gap['half_width_95']:.2f}")
        print(f"σ = {row['sigma']}: " + "   ".join(cells))


if __name__ == "__main__":
    Table1(arguments()).main()
