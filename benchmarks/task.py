"""One of the papers' tables as a grid of methods, settings and steps.

A *step length* is lr·C/(1 − momentum), what a run of clipped gradients moves; learning rates follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from erlangen.training.config import TrainConfig

Options = dict[str, Any]
#: (step length, C, momentum)
Pick = tuple[float, float, float]


@dataclass(frozen=True)
class Method:
    """Options of a method, its ``family`` (what trains together) and the settings it runs in (all of them).

    ``scale`` multiplies the step lengths that are tried: normalised steps do not shrink, and need shorter ones. ``tried``
    replaces the task's grid, ``fixed`` its picks. A method that is ``like`` another is not tuned: it takes what was tuned for
    that one in the task's ``base``. One that trains ``alone`` does what no ensemble can (it chooses its batches, or takes
    updates back).
    """

    family: str
    options: Options
    settings: tuple[str, ...] | None = None
    scale: float = 1.0
    tried: tuple[Pick, ...] = ()
    fixed: tuple[Pick, ...] = ()
    like: str | None = None
    alone: bool = False


@dataclass(frozen=True)
class Task:
    """One table. ``settings`` change the common options (σ at least); ``picks`` are measured as they are, a grid is tuned."""

    name: str
    common: Options
    settings: dict[str, Options]
    methods: dict[str, Method]
    lengths: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()
    momenta: tuple[float, ...] = (0.0, 0.9)
    picks: tuple[Pick, ...] = ()
    #: rows of a member in memory at a time, and members at a time, where the default does not fit
    rows: int | None = None
    members: int | None = None
    #: rows of all members at a time; larger batches take several passes
    most_rows: int | None = None
    precision: str | None = None
    #: settings that are tuned and measured before the next ones; none means all at once
    stages: tuple[tuple[str, ...], ...] = ()
    #: what is tuned for: accuracy, or (``test_loss``) the loss
    score: str = "test_accuracy"
    #: steps of a tuning trial, where a whole run would cost too much
    tuning_steps: int | None = None
    #: the task whose methods these are ``like``; runs of a seed start from its weights
    base: str | None = None
    #: the task with whose runs those of a seed share batches
    beside: str | None = None
    #: looks at the test set on the way, for a curve; nothing is decided by them
    looks: int = 1

    def grid(self, method: str) -> list[Pick]:
        scale, tried = self.methods[method].scale, self.methods[method].tried
        return list(tried) or [
            (length * scale, bound, mu) for length in self.lengths for bound in self.bounds for mu in self.momenta
        ]

    def fixed(self, method: str) -> list[Pick]:
        scale, own = self.methods[method].scale, self.methods[method].fixed
        return list(own) or [(length * scale, bound, mu) for length, bound, mu in self.picks]

    def where(self, method: str, stage: tuple[str, ...]) -> list[str]:
        return [s for s in self.methods[method].settings or self.settings if s in stage]

    def shape(self, method: str, setting: str) -> str:
        """What trains together: one family, and settings that differ in noise only."""
        other = {k: v for k, v in self.settings[setting].items() if k != "noise_multiplier"}
        return f"{self.methods[method].family} {other or ''}".strip()

    def options(self, method: str, setting: str) -> Options:
        """All that a pick, a seed and a device leave open."""
        return {**self.common, **self.methods[method].options, **self.settings[setting]}

    def config(self, method: str, setting: str, pick: Pick, seed: int, device: str) -> TrainConfig:
        length, bound, momentum = pick
        return TrainConfig(
            **self.options(method, setting), epsilon=None, delta=1e-5, max_grad_norm=bound, momentum=momentum, seed=seed,
            device=device, lr=length / bound * (1 - momentum), evaluations=1,
        )  # fmt: skip


def noise(sigma: float, **options: Any) -> Options:
    return {"noise_multiplier": sigma, **options}


def noise_free(table: Task, lr: float, **common: Any) -> Task:
    """Ordinary training: no noise, a bound that nothing reaches, momentum 0.9; not tuned."""
    bound = 1e6
    return replace(
        table, name=f"{table.name}-noise-free", common={**table.common, **common}, settings={"σ=0": noise(0.0)},
        methods={"no privacy": Method("plain", {})}, lengths=(), bounds=(), momenta=(), picks=((10 * lr * bound, bound, 0.9),),
        stages=(), tuning_steps=None,
    )  # fmt: skip


def shortened(config: TrainConfig, steps: int) -> TrainConfig:
    """So few steps of small batches."""
    return replace(config, steps=steps, batch=min(config.batch, 32)) if steps else config
