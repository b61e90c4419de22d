"""Tuning with the same effort for every mechanism: two numbers each, the same sequence of places, the same held-out records.

What tuning costs. Looking at held-out *training* records and keeping the best setting is itself a use of private data. Two ways:

* plain: the best of n trials, then a final run. ε covers the final run alone, and results must say so;
* accounted (repeat and select, Papernot and Steinke 2022): the number of trials is drawn at random (geometric, mean n), each
  trial draws its setting from a fixed law, trains, and releases its score with noise; the chosen trial's own model is what is
  released. The whole is one event, priced by RDP.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from erlangen.accounting import composed, epsilon, gaussian, repeat_and_select, sequence
from erlangen.accounting.metrics import accuracy
from erlangen.data import Dataset
from erlangen.streams import Stream
from erlangen.training.config import TrainConfig
from erlangen.training.session import Session

if TYPE_CHECKING:
    from dp_accounting import DpEvent

#: σ of the noise on the number of right held-out answers, in the accounted form
SCORE_NOISE = 10.0
#: factors on the default learning rate and on the clipping bound that are tried
RATES, BOUNDS = (0.1, 5.0), (0.1, 3.0)
#: Clipless has no bound to choose: a factor on the one number of its loss instead
LOSS_FACTORS = (0.25, 4.0)
LOSS_NUMBERS = {"cross-entropy": "temperature", "hinge": "margin", "hinge-kr": "margin", "cosine": "k"}


def places(count: int, seed: int | None = None) -> list[tuple[float, float]]:
    """Points of the unit square: the middle and then a Halton sequence, or (``seed``) independent draws."""
    if seed is not None:
        generator = Stream("tuning", seed).at(0)
        return [(float(a), float(b)) for a, b in torch.rand(count, 2, generator=generator, dtype=torch.float64)]
    return [(0.5, 0.5), *((_halton(k, 2), _halton(k, 3)) for k in range(1, count))][:count]


def setting(config: TrainConfig, place: tuple[float, float]) -> TrainConfig:
    """The configuration at a place of the square. Two numbers for every mechanism, so that none has more to choose from."""
    u, v = place
    if config.mechanism == "clipless":
        usual = dataclasses.replace(config, lr=0.0, batch=1, steps=1).settled(1)
        options = {
            **usual.mechanism_options,
            "loss": _scaled(usual.mechanism_options["loss"], _between(LOSS_FACTORS, v)),
        }
        return dataclasses.replace(config, lr=_digits(usual.lr * _between(RATES, u)), mechanism_options=options)
    bound = _digits(config.max_grad_norm * _between(BOUNDS, v))
    rate = dataclasses.replace(config, max_grad_norm=bound).usual_rate()
    return dataclasses.replace(config, max_grad_norm=bound, lr=_digits(rate * _between(RATES, u)))


def _scaled(loss: Any, factor: float) -> Any:
    """The loss with its number (temperature, margin, radius) multiplied; a loss without one, or a bare constant, stays."""
    options = dict(loss) if isinstance(loss, dict) else {"name": loss}
    number = LOSS_NUMBERS.get(options.get("name"))  # type: ignore[arg-type]
    if number is None:
        return loss
    return {**options, number: _digits(float(options.get(number, 1.0)) * factor)}


def split(data: Dataset, share: float, seed: int = 0) -> Dataset:
    """The training set without a ``share`` of its units, which stand in for the test set.

    Every unit is held out by a coin of its own, in the order of records or ids: one more at the end moves no other to the other
    side. Whoever knows the seed can tell an insertion in the middle, which moves all later coins: a seeded search is no release.
    """
    if data.unit is None:
        of_row, units = np.arange(len(data)), len(data)
    else:
        names, of_row = np.unique(np.asarray(data.unit), return_inverse=True)
        units = len(names)
    held = (np.random.default_rng(seed).random(units) < share)[of_row.reshape(-1)]
    if held.all() or not held.any():
        raise ValueError(
            f"{len(data)} records cannot be split with {share:.0%} held out; give more data, or --trials 0"
        )
    unit = None if data.unit is None else np.asarray(data.unit)[~held]
    return dataclasses.replace(
        data, x_train=data.x_train[~held], y_train=data.y_train[~held], x_test=data.x_train[held],
        y_test=data.y_train[held], unit=unit,
    )  # fmt: skip


def trial(
    config: TrainConfig, data: Dataset, share: float, split_seed: int, run_id: str, accounted: bool
) -> dict[str, Any]:
    """Train on the rest of the split at the configuration's own σ and sampling rate; score on what was held out.

    Accounted, the score is released with noise, and the public test accuracy of the very model is kept with it.
    """
    part = split(data, share, split_seed)
    kept = part.unit_count / data.unit_count
    small = dataclasses.replace(config, batch=config.batch * kept)
    session = Session(small, part, run_id=run_id)
    while session.step_count < session.config.steps:
        session.step()
    out: dict[str, Any] = {"lr": config.lr, "max_grad_norm": config.max_grad_norm, "held_out": len(part.y_test)}  # type: ignore[arg-type]
    out["mechanism_options"] = config.mechanism_options
    if not accounted:
        scores = session.evaluate()
        return {**out, "score": scores["test_accuracy"], "loss": scores["test_loss"]}
    held = (
        session.public_predictions()
    )  # of the held-out records, which are private: only the noisy count leaves this function
    assert held is not None
    released = accuracy(held.logits.argmax(1).numpy(), held.labels.numpy(), SCORE_NOISE)
    session.dataset = data  # the public test set, in place of the held-out records
    return {**out, "score": released.value, "test": session.evaluate()}


def best(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest score; the lower held-out loss decides between equals, then the earlier trial."""
    return max(trials, key=lambda t: (t["score"], -t.get("loss", 0.0)))


# --- the accounted form --------------------------------------------------------------------------------------------


def number_of_trials(mean: float, seed: int) -> int:
    """Geometric with this mean, at least 1; the same for every mechanism at one seed."""
    if mean <= 1:
        return 1
    u = float(torch.rand((), generator=Stream("trials", seed).at(0), dtype=torch.float64))
    return 1 + math.floor(math.log(1 - u) / math.log(1 - 1 / mean))


def search_event(step: DpEvent, steps: int, trials: float) -> DpEvent:
    """The whole search: the best of a geometric number of (training, noisy score)."""
    one = sequence([composed(step, steps), gaussian(SCORE_NOISE)])
    return one if trials <= 1 else repeat_and_select(one, trials, 1.0)


def search_epsilon(step: DpEvent, steps: int, trials: float, delta: float) -> float:
    return epsilon([(search_event(step, steps, trials), 1)], delta, "rdp")


def calibrate(make_step: Callable[[float], DpEvent], steps: int, trials: float, target: float, delta: float) -> float:
    """The least σ (to 0.1 %) with which the search costs at most (``target``, ``delta``)."""
    low, high = 0.05, 1.0
    while search_epsilon(make_step(high), steps, trials, delta) > target:
        low, high = high, 2 * high
        if high > 1e5:
            raise ValueError(
                f"no noise brings a search of {trials:g} trials to ε = {target:g}: the noisy scores alone cost more; "
                "give a larger ε or fewer trials"
            )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if search_epsilon(make_step(middle), steps, trials, delta) > target:
            low = middle
        else:
            high = middle
    return high


def _between(ends: tuple[float, float], share: float) -> float:
    """Log-uniform."""
    return ends[0] * (ends[1] / ends[0]) ** share


def _digits(value: float) -> float:
    """To three digits: a setting is written down and read again."""
    return float(f"{value:.3g}")


def _halton(index: int, base: int) -> float:
    """The radical inverse of ``index``."""
    value, scale = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value, scale = value + digit * scale, scale / base
    return value
