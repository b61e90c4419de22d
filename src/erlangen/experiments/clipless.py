"""Clipless DP-SGD: the Pareto fronts of Figure 5, Theorem 1's regimes, and the variance of the averaged gradient.

The paper prints no numbers for its figures and states neither networks nor settings for them, so there is nothing to
stand beside ours; its ε assume Poisson sampling of batches that were shuffled, ours are drawn that way. All cells train
at an ε that was given, δ = 1e-5, add/remove-one: the three splits of the noise and DP-SGD on an ordinary CNN, at equal ε.
Figure 4 (speed and memory) is ``benchmarks/clipless.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from erlangen.data import Dataset, load
from erlangen.experiments.measurements import Measurement, Point
from erlangen.experiments.presets import Cell, Preset, register_preset
from erlangen.experiments.releases import per_sample
from erlangen.training.config import TrainConfig

PAPER = "Clipless"
EPSILONS = (1.0, 2.0, 4.0, 8.0)
SPLITS = ("optimal", "local", "global")


@dataclass(frozen=True)
class Front:
    """A data set's number of records, and the settings of each method, chosen among the same number of trials each."""

    records: int
    settings: Mapping[str, Mapping[str, Any]]


def _dense(lr: float, margin: float) -> dict[str, Any]:
    loss = {"name": "hinge", "margin": margin}
    return {"model": "lipschitz-mlp", "model_options": {"hidden": [64]}, "lr": lr, "loss": loss}


def _front_of(records: int, optimal: dict[str, Any], others: dict[str, Any]) -> Front:
    cnn = {"model": "cnn", "model_options": {"width": 32}, "lr": 1.0, "max_grad_norm": 1.0}
    return Front(records, {"optimal": optimal, "local": others, "global": others, "iso": cnn})


_PATCHES = {**_dense(1.0, 0.02), "model": "lipschitz-patches", "model_options": {"patch": 4, "width": 16}}
#: chosen by ``benchmarks/clipless_front.py`` on a part of the training sets, at ε = 3 (docs/results/clipless.md)
FRONTS: dict[str, Front] = {
    "mnist": _front_of(60_000, _dense(1.0, 0.05), _dense(1.0, 0.05)),
    "fashion_mnist": _front_of(60_000, _PATCHES, _dense(0.3, 0.02)),
    "cifar10": _front_of(50_000, _dense(0.3, 0.2), _dense(0.3, 0.05)),
}
TEMPERATURE = 32.0
BATCH, EPOCHS = 8192, 20


def config(data: str, method: str, epsilon: float | None, **changes: Any) -> TrainConfig:
    """One run of a front: ``method`` is a split of clipless noise, or "iso"."""
    front = FRONTS[data]
    chosen = dict(front.settings[method])
    if method == "iso":
        chosen["mechanism"] = "iso"
    else:
        chosen |= {"mechanism": "clipless", "mechanism_options": {"split": method, "loss": chosen.pop("loss")}}
    shared: dict[str, Any] = dict(
        data=data, epsilon=epsilon, delta=1e-5, batch=BATCH, steps=round(EPOCHS * front.records / BATCH), momentum=0.9,
        ema=0.99, evaluations=1,
    )  # fmt: skip
    return TrainConfig(**{**shared, **chosen, **changes})


def _front() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            f"{data} {'ISO' if method == 'iso' else method} ε={epsilon:g}", config(data, method, epsilon),
            records=FRONTS[data].records, against=(f"{data} ISO ε={epsilon:g}",) if method == "optimal" else (),
        )
        for data in FRONTS
        for epsilon in EPSILONS
        for method in (*SPLITS, "iso")
    )  # fmt: skip


register_preset(
    Preset(
        "clipless-fig5", f"{PAPER} (Figure 5)", "Accuracy against ε on MNIST, Fashion-MNIST and CIFAR-10: splits and ISO",
        60_000, _front(), note="The paper prints no numbers for this figure.",
    )
)  # fmt: skip


# -- Theorem 1 --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _data(name: str) -> Dataset:
    return load(name)


def _network(name: str, hidden: list[int], lipschitz: float, seed: int) -> Any:
    """Dense layers of constant K with orthogonal weights: as gradient-norm preserving as K allows."""
    from erlangen.models.lipschitz import lipschitz_mlp

    data = _data(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lipschitz_mlp(data.input_shape, data.classes, hidden=hidden, lipschitz=lipschitz)


def regimes(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """The certified Δ of a network of D layers of constant K, and the gradients that public records really have."""
    from erlangen.lipschitz import CrossEntropy, backpropagate_bounds

    k, depth = options["K"], options["depth"]
    net, loss = _network(options["data"], [options["width"]] * (depth - 1), k, seed), CrossEntropy(TEMPERATURE)
    constant = loss.constant(_data(options["data"]).classes)
    bounds = backpropagate_bounds(net, constant)
    data = _data(options["data"])
    x, y = torch.from_numpy(data.x_train[: options["records"]]), torch.from_numpy(data.y_train[: options["records"]])
    norms = per_sample(net, x, y, loss).double().norm(dim=1)
    return {
        "bound": bounds.total / constant,
        "theorem": math.sqrt(depth) * k ** (depth - 1),
        "gradient": float(norms.mean()) / constant,
        "used": float(norms.mean()) / bounds.total,
    }


register_preset(
    Measurement(
        "clipless-theorem1", f"{PAPER} (Theorem 1)", "Bound and gradient norms for K < 1, K = 1 and K > 1 against depth",
        "erlangen.experiments.clipless:regimes",
        tuple(
            Point(f"K={k} D={depth}", {"K": k, "depth": depth, "width": 64, "data": "digits", "records": 500},
                  quick={"records": 50})
            for k in (0.5, 0.9, 1.0, 1.1, 2.0)
            for depth in (1, 2, 4, 8, 16)
        ),
        {
            "bound": "certified Δ of the whole gradient / L", "theorem": "√D·K^(D−1)·X₀ (no biases)",
            "gradient": "mean gradient norm of the records / L", "used": "mean gradient norm / Δ",
        },
        seeds=5,
        note="Nothing is released: weights are random and orthogonal times K, records are public.",
    )
)  # fmt: skip


# -- variance against batch size --------------------------------------------------------------------------------------

#: batches that are averaged over, for every seed
DRAWS = 50


def variance(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """E‖ḡ_b − ḡ‖²/‖ḡ‖² of the mean gradient of b records drawn at random, and what clipping does to it.

    ``clipped_bias`` is the same for the *expectation* of the clipped mean (bound: the lower quartile of the norms, scaled
    to the length of ḡ): it does not depend on b, so no batch is large enough to remove it.
    """
    from erlangen.lipschitz import CrossEntropy, Projector

    data, net = _data(options["data"]), _network(options["data"], [32], 1.0, seed)
    count = options["records"]
    x, y = torch.from_numpy(data.x_train[:count]), torch.from_numpy(data.y_train[:count])
    loss, optimizer, project = CrossEntropy(TEMPERATURE), torch.optim.SGD(net.parameters(), 0.3), Projector(net)
    for _ in range(options["steps"]):  # away from the start, where all records pull alike
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
        project()
    g = per_sample(net, x, y, loss).double()
    mean, norms = g.mean(0), g.norm(dim=1)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(g), (DRAWS, options["batch"]), generator=generator)
    spread = torch.stack([(g[r].mean(0) - mean).square().sum() for r in rows]).mean() / mean.square().sum()
    clipped = (g * (norms.quantile(0.25) / norms.clamp(min=1e-30)).clamp(max=1.0)[:, None]).mean(0)
    bias = (clipped * (mean.norm() / clipped.norm()) - mean).square().sum() / mean.square().sum()
    return {
        "variance": float(spread),
        "variance_times_batch": float(spread) * options["batch"],
        "clipped_bias": float(bias),
    }


register_preset(
    Measurement(
        "clipless-variance", f"{PAPER} (variance)", "Variance of the averaged gradient against batch size",
        "erlangen.experiments.clipless:variance",
        tuple(
            Point(f"b={batch}", {"batch": batch, "data": "digits", "records": 1000, "steps": 50},
                  quick={"records": 200, "steps": 5})
            for batch in (8, 16, 32, 64, 128, 256, 512)
        ),
        {
            "variance": "E‖ḡ_b − ḡ‖²/‖ḡ‖²", "variance_times_batch": "the same, times b",
            "clipped_bias": "‖E clipped − ḡ‖²/‖ḡ‖² at equal length",
        },
        seeds=5,
        note="Nothing is released: weights are trained without noise on public records.",
    )
)  # fmt: skip
