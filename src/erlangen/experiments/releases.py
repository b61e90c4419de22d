"""Measurements of single releases: error against the clean average, runtime, and Theorem 1's items. Public data only.

These look at gradients without noise, which no private run may show; see `erlangen.mechanisms.diagnostics`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.data import Dataset, load
from erlangen.gradients import PerSampleGradients, RowMap, Tape, attach, detach
from erlangen.mechanisms import Context, Mechanism, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.diagnostics import gradient_error, measure_efficiency
from erlangen.models import make_model

#: rows of per-sample gradients that are in flight at a time
ROWS = 256
#: independent noise on the same sums, for every seed
REPEATS = 10
#: bounds tried for "C tuned", as multiples of the paper's
FACTORS = (1.0, 10.0, 30.0, 100.0)
#: options of a point that are no options of its mechanism
_OWN = ("mechanism", "sigma", "d", "batch", "bound", "clipping", "tuned", "epochs", "step", "rate", "optimum_steps")


def mechanism_of(options: Mapping[str, Any], seed: int, bound: float) -> Mechanism:
    rule = make_clipping(options.get("clipping", "flat"), bound)
    own = {k: v for k, v in options.items() if k not in _OWN}
    context = Context(options["sigma"], rule, StreamNoise(seed), nn.Identity(), options.get("batch", 1), own)
    return make_mechanism(options["mechanism"], context)


# -- error ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def cifar10() -> Dataset:
    return load("cifar10")


@lru_cache(maxsize=1)
def trained(epochs: int) -> tuple[nn.Module, tuple[dict[str, Tensor], ...]]:
    """A CNN on CIFAR-10 and its weights at four moments of ordinary training."""
    data = cifar10()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model("geodp-cnn", data.input_shape, data.classes)
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    order = torch.cat([torch.randperm(len(x), generator=torch.Generator().manual_seed(e)) for e in range(epochs)] or [
        torch.zeros(0, dtype=torch.long)
    ])  # fmt: skip
    moments, batches = [_weights(model)], order.split(32) if len(order) else ()
    marks = {len(batches) * k // 3 for k in (1, 2, 3)}
    for k, rows in enumerate(batches, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if k in marks:
            moments.append(_weights(model))
    return model, tuple(moments)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@lru_cache(maxsize=1)
def gradients(d: int, batch: int, seed: int, epochs: int) -> Tensor:
    """``batch`` per-sample gradients [batch, d]: records and moments at random, d coordinates at random."""
    data, (model, moments) = cifar10(), trained(epochs)
    rng = np.random.default_rng((seed, d, batch))
    rows = torch.from_numpy(rng.permutation(len(data))[:batch])
    size = sum(w.numel() for w in moments[0].values())
    columns = torch.from_numpy(np.sort(rng.choice(size, d, replace=False)))

    out = torch.empty(batch, d)
    for k, start in enumerate(range(0, batch, ROWS)):
        part = rows[start : start + ROWS].numpy()
        model.load_state_dict(moments[k % len(moments)])
        each = per_sample(model, torch.from_numpy(data.x_train[part]), torch.from_numpy(data.y_train[part]))
        out[start : start + ROWS] = each[:, columns]
    return out


def per_sample(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> Tensor:
    """Every record's own gradient of a loss that is a mean over records, [n, d]."""
    tape = Tape(dict(model.named_parameters()))
    tape.rows = RowMap.regular(len(x))
    attach(model, tape)
    try:
        loss(model(x), y).backward()
        with torch.no_grad():
            found = tape.gradients()
            return torch.cat([found.dense(name).flatten(1) for name, _ in model.named_parameters()], 1)
    finally:
        detach(model)


def clipped_mean(g: Tensor, bound: float) -> Tensor:
    """The average of the rows clipped at ``bound``, in float64."""
    total = torch.zeros(g.shape[1], dtype=torch.float64)
    for part in g.split(ROWS):
        total += ((bound / part.norm(dim=1)).clamp(max=1.0) @ part).double()
    return total / len(g)


def release_error(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Direction error, gradient error and cosine of a release, against the average clipped at the paper's bound."""
    d, batch, epochs = options["d"], options["batch"], options.get("epochs", 2)
    bound = options["bound"]
    g = gradients(d, batch, seed, epochs)
    if options.get("tuned"):  # on other noise than what is reported
        bound = min(FACTORS, key=lambda f: _errors(options, g, f * bound, 10_000 + seed)["direction_mse"]) * bound
    return _errors(options, g, bound, seed)


def _errors(options: Mapping[str, Any], g: Tensor, bound: float, seed: int) -> dict[str, float]:
    mechanism = mechanism_of(options, seed, bound)
    mechanism.bind({"g": torch.zeros(g.shape[1])}, len(g))
    for part in g.split(ROWS):
        mechanism.accumulate(PerSampleGradients.from_dense({"g": part}))
    released = []
    for repeat in range(REPEATS):
        one = copy.deepcopy(mechanism)
        one.noise = StreamNoise(seed, f"repeat-{repeat}")
        released.append(one.finish(len(g))["g"])
    found = gradient_error(torch.stack(released).double(), clipped_mean(g, options["bound"]))
    return {"direction_mse": found.direction_mse, "gradient_mse": found.gradient_mse, "cosine": found.cosine}


# -- runtime --------------------------------------------------------------------------------------------------------


def release_runtime(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Processor seconds of one release, and the same as a multiple of DP's on the same gradients (best of three, alternating)."""
    d, batch = options["d"], options["batch"]
    g = torch.randn(batch, d, generator=torch.Generator().manual_seed(seed))
    own, plain = mechanism_of(options, seed, 1.0), mechanism_of({"mechanism": "iso", "sigma": 1.0}, seed, 1.0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(4):
        for mine, mechanism in ((True, own), (False, plain)):
            mechanism.bind({"g": g[0]}, batch)
            started = time.process_time()
            mechanism.accumulate(PerSampleGradients.from_dense({"g": g}))
            mechanism.finish(batch)
            if repeat:
                times[mine].append(time.process_time() - started)
    seconds, reference = min(times[True]), min(times[False])
    return {"seconds": seconds, "ratio": seconds / reference}


# -- Theorem 1 ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def path(steps: int, rate: float, optimum_steps: int) -> tuple[Tensor, Tensor]:
    """Logistic regression on MNIST: the weights after ``steps`` clipped steps, and a long descent as the optimum."""
    x, y = _mnist()
    w = torch.zeros(10, x.shape[1])
    for k in range(steps):
        rows = torch.from_numpy(np.random.default_rng((1, k)).permutation(len(x))[:4096])
        w -= rate * clipped_mean(per_record(w, x[rows], y[rows]), 0.1).view_as(w).float()
    best, velocity = torch.zeros(10, x.shape[1]), torch.zeros(10, x.shape[1])
    hot = F.one_hot(y, 10).float()
    for _ in range(optimum_steps):
        velocity = 0.9 * velocity + (torch.softmax(x @ best.T, 1) - hot).T @ x / len(x)
        best -= 0.1 * velocity
    return w, best


@lru_cache(maxsize=1)
def _mnist() -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and a constant one for the bias."""
    data = load("mnist")
    x = (torch.from_numpy(data.x_train).flatten(1) + 1) / 2
    return torch.cat([x, torch.ones(len(x), 1)], 1), torch.from_numpy(data.y_train)


def per_record(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients [n, 10·785] of the cross-entropy of each record."""
    error = torch.softmax(x @ w.T, 1) - F.one_hot(y, 10)
    return (error[:, :, None] * x[:, None]).flatten(1)


def efficiency_split(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Items A and B of one step from a point of the path, averaged over independent noise."""
    w, best = path(options["step"], options["rate"], options.get("optimum_steps", 150))
    x, y = _mnist()
    rows = torch.from_numpy(np.random.default_rng((2, seed)).permutation(len(x))[: options["batch"]])
    g = per_record(w, x[rows], y[rows])
    mechanism = mechanism_of(options, seed, options["bound"])
    vector = lambda t: {"w": t.flatten()}  # noqa: E731
    clean = vector(clipped_mean(g, options["bound"]))
    found = measure_efficiency(
        mechanism, {"w": g}, vector(w), vector(best), clean, options["rate"], len(g), repeats=REPEATS
    )
    return {"item_a": found.item_a, "item_b": found.item_b, "difference": found.difference}
