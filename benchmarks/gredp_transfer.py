"""GReDP's Table 2, its CIFAR-10 half, on one GPU: fine-tuning the last convolutions of a public ResNet-18, many runs at once.

    python -m erlangen.experiments.pretrain --data cifar10_first_half --out FOLDER
    python benchmarks/gredp_transfer.py --data FOLDER --out transfer.json --budget 240
    python benchmarks/gredp_transfer.py --data FOLDER --out transfer.json --table          # needs no GPU
    python benchmarks/gredp_transfer.py --data FOLDER --out five.json --weights resnet18-cifar10-first-half-five --epsilons 1
    python benchmarks/gredp_transfer.py --data FOLDER --out plain.json --plain             # the paper's row without privacy

FOLDER holds cifar10.npz. One half of the training set is public and has trained the network; the other half is private. The
frozen trunk's features are computed once; what trains is an ensemble of tails: one or two convolutions on 2×2 maps and a
linear head, which starts anew (some public classes are private ones too, and nobody should be paid for knowing them). Every
method tunes its step length lr·C/(1 − momentum) at every ε with the same trials, in a third of the steps and on a twelfth of
the private half that is held out; then all seeds train on the whole of it, and the test set is read once. Runs of one seed
start from the same weights and draw the same batches, with noise of their own. Beside the paper's settings stands the head
alone (no convolution trains). Finished ensembles are written as they come; the same command goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from resumable import Bench, Row, held_out
from torch import Tensor, nn

import erlangen.experiments.pretrain  # noqa: F401  (registers the halves)
from erlangen.circulant import CirculantConv2d
from erlangen.data import Dataset, load
from erlangen.experiments.gredp import AUTO_S, CLAIMED, SOUND, TABLE_2
from erlangen.models import make_model, register_model
from erlangen.training.config import TrainConfig
from erlangen.training.device import pick_device

WEIGHTS = "resnet18-cifar10-first-half"
RECORDS, BATCH, STEPS, DELTA, MOMENTUM = 25_000, 500, 1500, 1e-5, 0.9
#: ε → σ of 1,500 steps at q = 0.02, δ = 1e-5: of that ε (PLD), and of a plain Gaussian's claim of it (RDP)
SIGMAS = {0.5: (5.5355, 6.0326), 1.0: (3.0162, 3.2627), 2.0: (1.7322, 1.8515)}
#: what a file that does not say so was made with
USUAL = {"steps": STEPS, "tune_steps": STEPS // 3, "weights": WEIGHTS, "records": None}
#: lr·C/(1 − momentum); C is 1, because nearly every gradient is clipped
LENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)
#: the head alone has 5,130 weights in place of millions, and noise of a twentieth the length
HEAD_SCALE = 10.0
#: ordinary training of the same layers: no noise, a bound that nothing reaches, lr 0.01
PLAIN, PLAIN_BOUND, PLAIN_LENGTH = "no privacy", 1e6, 0.1
#: the paper's plain networks on CIFAR-10: last one, last two convolutions
PAPER_PLAIN = (80.27, 86.59)
#: name → (its place among the paper's DP-SGD, Spectral-DP and GReDP, options); dense first
METHODS: dict[str, tuple[int | None, dict[str, Any]]] = {
    name: (column, options)
    for circulant in (False, True)
    for name, column, options in (*SOUND, ("AUTO-S", None, AUTO_S), *CLAIMED)
    if name.endswith("circulant") == circulant
}


# -- the network ----------------------------------------------------------------------------------------------------


class FrozenNorm(nn.Module):
    """A group norm with public constants, in float32."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.groups, self.eps = norm.num_groups, norm.eps
        self.register_buffer("scale", norm.weight.detach().clone())
        self.register_buffer("shift", norm.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.float(), self.groups, self.scale, self.shift, self.eps).to(x.dtype)  # type: ignore[arg-type]


class Tail(nn.Module):
    """What trains. It starts from features: pooled ones (no convolution), (h, x) around the last, x before the last two."""

    def __init__(self, block: Any, convolutions: int) -> None:
        super().__init__()
        self.conv1 = block.conv1 if convolutions == 2 else None
        self.norm1 = FrozenNorm(block.norm1) if convolutions == 2 else None
        self.conv2 = block.conv2 if convolutions else None
        self.norm2 = FrozenNorm(block.norm2) if convolutions else None
        self.head: nn.Module = nn.Identity()  # drawn for every run

    def forward(self, z: Tensor) -> Tensor:
        if self.conv2 is None or self.norm2 is None:
            return self.head(z)
        if self.conv1 is None or self.norm1 is None:
            h, x = z.chunk(2, 1)
        else:
            x = z
            h = F.relu(self.norm1(self.conv1(x)))
        return self.head(F.relu(self.norm2(self.conv2(h)) + x).amax((2, 3)))


@lru_cache(maxsize=8)
def public_tail(weights: str | None, convolutions: int, circulant: int | None) -> Tail:
    """The public layers behind the trunk; the nearest circulant twins of the convolutions that train, if that is asked for."""
    tail = Tail(public_network(weights)[-5], convolutions)
    for name in ("conv1", "conv2"):
        conv = getattr(tail, name)
        if circulant is not None and conv is not None:
            setattr(tail, name, CirculantConv2d.from_dense(conv, circulant))
    return tail


@lru_cache(maxsize=1)
def public_network(weights: str | None) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_model("resnet18", (3, 32, 32), 10, weights=weights)


def tail(
    input_shape: tuple[int, ...], classes: int, weights: str | None = None, convolutions: int = 1, circulant: int | None = None
) -> nn.Module:
    head = nn.Linear(512, classes)  # first: what is public is made once, and would draw from the same generator
    made = copy.deepcopy(public_tail(weights, convolutions, circulant))
    made.head = head
    return made


register_model("resnet18-tail", tail)


@torch.no_grad()
def features(images: Any, weights: str | None, convolutions: int, device: str, rows: int = 1000) -> Tensor:
    """What the frozen trunk makes of the images, on the host."""
    network = public_network(weights).to(device)
    trunk, block = network[:-5], network[-5]
    parts = []
    for start in range(0, len(images), rows):
        x = trunk(torch.from_numpy(images[start : start + rows]).to(device))
        if convolutions == 0:
            x = block(x).amax((2, 3))
        elif convolutions == 1:
            x = torch.cat([F.relu(block.norm1(block.conv1(x))), x], 1)
        parts.append(x.cpu())
    network.cpu()
    return torch.cat(parts)


@torch.no_grad()
def public_accuracy(data: Dataset, weights: str | None, device: str) -> float:
    """Of the public network as it is, which has seen no private record."""
    assert data.x_test is not None
    pooled = features(data.x_test, weights, 0, device)
    guess = public_network(weights)[-1](pooled).argmax(1)
    return float((guess == torch.from_numpy(data.y_test)).float().mean())


# -- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    convolutions: int
    method: str
    epsilon: float
    length: float
    seed: int

    @property
    def key(self) -> list[Any]:
        return [self.convolutions, self.method, self.epsilon, self.length, self.seed]

    @property
    def given(self) -> Row:
        return {"key": self.key}

    @property
    def pair(self) -> str:
        """The runs that share initial weights and batches."""
        return f"{self.convolutions}Conv ε={self.epsilon:g} {self.seed}"

    @property
    def family(self) -> str:
        """What trains together: one shape of network, one rule of clipping, filtered or not."""
        return f"{self.convolutions}Conv" + "".join(
            f" {word}" for word in ("circulant", "Spectral", "AUTO-S") if word in self.method
        )

    def config(self, weights: str | None, device: str, steps: int, batch: int) -> TrainConfig:
        plain = self.method == PLAIN
        _, options = (None, {}) if plain else METHODS[self.method]
        model = {"convolutions": self.convolutions, **options.get("model_options", {})}
        values: dict[str, Any] = {**options, "model_options": model, "weights": weights}
        return TrainConfig(
            data="features", model="resnet18-tail", batch=batch, steps=steps, ema=0.99, momentum=MOMENTUM,
            max_grad_norm=PLAIN_BOUND if plain else 1.0,
            lr=self.length * (1 - MOMENTUM), epsilon=None, delta=DELTA, seed=self.seed, device=device, evaluations=1,
            noise_multiplier=0.0 if plain else SIGMAS[self.epsilon]["published" in self.method], **values,
        )  # fmt: skip


class Transfer(Bench[Run]):
    again = "the same command goes on"

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, resume=True)
        self.device = pick_device(options.device)
        self.weights = None if options.weights == "none" else options.weights
        self._features: dict[int, Dataset] = {}
        made = {"weights": self.weights, **{name: getattr(options, name) for name in ("steps", "tune_steps", "records")}}
        fixed = {"batch": BATCH, "momentum": MOMENTUM, **{f"σ at ε={e:g}": sigmas for e, sigmas in SIGMAS.items()}}
        self.results.hold({**made, **fixed}, unsaid=USUAL)

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def images(self) -> Dataset:
        if not hasattr(self, "_images"):
            data = load("cifar10_second_half")
            n = self.options.records
            assert data.x_test is not None
            assert data.y_test is not None
            self._images = data if n is None else replace(
                data, x_train=data.x_train[:n], y_train=data.y_train[:n], x_test=data.x_test[:n], y_test=data.y_test[:n]
            )  # fmt: skip
        return self._images

    def dataset(self, convolutions: int, phase: str) -> Dataset:
        """Features in the place of images; for tuning, a twelfth of the records stands in for the test set."""
        if convolutions not in self._features:
            self._features.clear()
            made = [
                features(x, self.weights, convolutions, self.device).numpy()
                for x in (self.images.x_train, self.images.x_test)
            ]
            self._features[convolutions] = replace(self.images, name="features", x_train=made[0], x_test=made[1])
        whole = self._features[convolutions]
        return held_out(whole) if phase == "tuning" else whole

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, phase: str, trials: list[Run]) -> list[Row]:
        steps = self.options.tune_steps if phase == "tuning" else self.options.steps
        data = self.dataset(trials[0].convolutions, phase)
        configs = [r.config(self.weights, self.device, steps, min(BATCH, len(data) // 4)) for r in trials]
        precision = torch.bfloat16 if self.device.startswith("cuda") else None
        ids = [f"{phase} {r.pair}" for r in trials]
        return self.together(configs, data, run_ids=ids, precision=precision, positions=4).evaluate()

    # -- phases ---------------------------------------------------------------------------------------------------

    def methods(self, convolutions: int) -> list[str]:
        return [m for m in METHODS if convolutions or m == "DP-SGD"]

    def tune(self, convolutions: int) -> None:
        scale = 1.0 if convolutions else HEAD_SCALE
        self.run("tuning", [
            Run(convolutions, m, e, length * scale, 1000)
            for m in self.methods(convolutions) for e in self.options.epsilons for length in self.options.lengths
        ])  # fmt: skip

    def measure(self, convolutions: int) -> None:
        self.run("runs", [
            Run(convolutions, m, e, best(self.results.content, convolutions, m, e), seed)
            for m in self.methods(convolutions) for e in self.options.epsilons for seed in range(self.options.seeds)
        ])  # fmt: skip

    def work(self) -> None:
        content = self.results.content
        if "public_accuracy" not in content:
            content["public_accuracy"] = public_accuracy(self.images, self.weights, self.device)
            print(f"public network: {100 * content['public_accuracy']:.2f} %", flush=True)
        for convolutions in self.options.convolutions:
            if self.options.plain:
                seeds = range(self.options.seeds)
                self.run("runs", [Run(convolutions, PLAIN, math.inf, PLAIN_LENGTH, seed) for seed in seeds])
            else:
                self.tune(convolutions)
                self.measure(convolutions)

    def finish(self) -> None:
        super().finish()
        tuning, runs = (len(self.results.rows(phase)) for phase in self.phases)
        print(f"{tuning} trials, {runs} runs, {self.results.content['seconds']:.0f} s")


def best(result: Row, convolutions: int, method: str, epsilon: float) -> float:
    """The step length with the best held-out accuracy; the shorter one of equals."""
    tried = [row for row in result["tuning"] if row["key"][:3] == [convolutions, method, epsilon]]
    return float(max(tried, key=lambda row: (row["test_accuracy"], -row["key"][3]))["key"][3])


# -- the table ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def true_epsilon(method: str, epsilon: float) -> tuple[float, float]:
    """What a run costs by its mechanism's own event, by PLD and by RDP. Clipping is flat: the network does not matter."""
    from erlangen.accounting import epsilon as spent
    from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
    from erlangen.sampling import PoissonSampler

    config = Run(1, method, epsilon, 1.0, 0).config(None, "cpu", STEPS, BATCH)
    assert config.noise_multiplier is not None
    rule = make_clipping(config.clipping, config.max_grad_norm, **config.clipping_options)
    model = nn.Conv2d(1, 1, 3)
    mechanism = make_mechanism(
        config.mechanism, Context(config.noise_multiplier, rule, StreamNoise(0), model, BATCH, config.mechanism_options)
    )
    mechanism.bind(dict(model.named_parameters()), BATCH)
    event = PoissonSampler(RECORDS, BATCH).event(mechanism.event())
    return spent([(event, STEPS)], DELTA, "pld"), spent([(event, STEPS)], DELTA, "rdp")


def _trains(convolutions: int) -> str:
    return f"{convolutions}Conv" if convolutions else "head"


def _spread(numbers: list[float]) -> str:
    deviation = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.2f}{deviation} ({len(numbers)})"


def table(result: Row) -> str:
    """Markdown: mean and deviation over seeds, and paired differences to DP-SGD of the same setting.

    A star marks a step length at the edge of those that were tried.
    """
    from erlangen.experiments.runner import paired

    found: dict[tuple[int, float, str], dict[int, float]] = {}
    lengths: dict[tuple[int, float, str], float] = {}
    plain: dict[int, list[float]] = {}
    for row in result["runs"]:
        k, method, e, length, seed = row["key"]
        if method == PLAIN:
            plain.setdefault(k, []).append(100 * row["test_accuracy"])
        elif length == best(result, k, method, e):  # more trials may have moved it since
            found.setdefault((k, e, method), {})[seed] = 100 * row["test_accuracy"]
            lengths[k, e, method] = length
    lines = [
        f"Public network alone: {100 * result['public_accuracy']:.2f} %.", "",
        "| trains | ε | method | true ε (PLD / RDP) | step length | test accuracy, % | − DP-SGD | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {_trains(k)} | ∞ | {PLAIN} | ∞ | {PLAIN_LENGTH:g} | {_spread(values)} | – | "
        f"{f'{PAPER_PLAIN[k - 1]:g}' if k else '–'} |"
        for k, values in sorted(plain.items())
    ]  # fmt: skip
    for k, e, method in sorted(found, key=lambda key: (key[0], key[1], list(METHODS).index(key[2]))):
        values, rival = found[k, e, method], found.get((k, e, "DP-SGD"), {})
        common = sorted(set(values) & set(rival))
        gap = paired([values[s] for s in common], [rival[s] for s in common]) if common and method != "DP-SGD" else None
        half = "" if gap is None or gap["half_width_95"] is None else f" ± {gap['half_width_95']:.2f}"
        column = METHODS[method][0]
        paper = "–" if column is None or k == 0 else f"{TABLE_2['cifar10'][e][column][k - 1]:g}"
        numbers = list(values.values())
        difference = "–" if gap is None else f"{gap['mean']:+.2f}{half}"
        pld, rdp = true_epsilon(method, e)
        tried = [row["key"][3] for row in result["tuning"] if row["key"][:3] == [k, method, e]]
        edge = "*" if lengths[k, e, method] in (min(tried), max(tried)) else ""
        lines.append(
            f"| {_trains(k)} | {e:g} | {method} | {pld:.2f} / {rdp:.2f} | {lengths[k, e, method]:g}{edge} | "
            f"{_spread(numbers)} | {difference} | {paper} |"
        )  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with cifar10.npz and {WEIGHTS}.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of what is in the file")
    parser.add_argument("--plain", action="store_true", help="ordinary training of the same layers, in place of private")
    parser.add_argument("--weights", default=WEIGHTS, help="public weights; none: random ones, to see that it runs")
    parser.add_argument("--convolutions", type=int, nargs="+", default=[1, 0, 2], choices=[0, 1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(SIGMAS), choices=list(SIGMAS))
    parser.add_argument("--lengths", type=float, nargs="+", default=LENGTHS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=USUAL["steps"])
    parser.add_argument("--tune-steps", type=int, default=USUAL["tune_steps"])
    parser.add_argument("--members", type=int, default=48, help="runs trained at once")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no ensemble is started")
    parser.add_argument("--records", type=int, help="only so many of each set, to see that it runs")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())))
    else:
        Transfer(options).main()


if __name__ == "__main__":
    main()
