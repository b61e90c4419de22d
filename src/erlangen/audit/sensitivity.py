"""Certified sensitivities under attack: every Lipschitz layer, every loss, whole networks after training, and a control.

The search (`erlangen.lipschitz.search`) climbs towards a record whose gradient exceeds its bound. Nothing found proves
nothing, so two more things are reported: how close to the bounds it came, and whether it refutes a network one of whose
bounds is wrong on purpose. If it does not, the audit is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from erlangen.audit.examples import bounded_examples
from erlangen.experiments.pool import Pool
from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    BoundedInput,
    LipschitzLayer,
    MaxMin,
    MulticlassHinge,
    OrthogonalDense,
    SensitivityError,
    SpectralDense,
)
from erlangen.lipschitz import Sequential as Network
from erlangen.lipschitz.audit import audit_network, networks
from erlangen.lipschitz.base import Activation
from erlangen.lipschitz.losses import LOSSES, KCosine, LipschitzLoss
from erlangen.lipschitz.search import check_layer, check_loss, check_sensitivity

#: a layer's bound counts as tight, and the search as one with teeth, from here
TEETH = 0.9
#: steps between full certificates of networks at full size; in between holds the triangle inequality, as in training
FULL_EVERY = 10
Progress = Callable[[int, int, str], None]
#: layers that stand at the ends of a network
OUTER: dict[str, tuple[Callable[[], LipschitzLayer], tuple[int, ...]]] = {
    "BoundedInput": (lambda: BoundedInput((2, 4, 4), 1.5, scale=0.8), (2, 4, 4)),
    "BoundedInput, YUV": (lambda: BoundedInput((3, 4, 4), 1.5, colour="yuv", centre=True), (3, 4, 4)),
    "AdaptiveBackwardClip": (lambda: AdaptiveBackwardClip(0.5), (5,)),
}


class WrongBound(SpectralDense):
    """The control: forgets that an input can be as long as X."""

    def parameter_bound(self, x: Activation, g: float) -> dict[str, float]:
        return {"weight": 0.5 * g * x.norm}


def control(seed: int = 0) -> dict[str, Any]:
    """A network with one wrong bound; ``refuted`` must be true."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Network(BoundedInput((8,), 2.0), OrthogonalDense(8, 8), MaxMin(-1), WrongBound(8, 4))
    try:
        check_sensitivity(net, MulticlassHinge(margin=50.0), steps=5, restarts=3, seed=seed)
    except SensitivityError as error:
        return {"refuted": True, "error": str(error)}
    return {"refuted": False, "error": None}


def audit_layers(seed: int = 0, steps: int = 20) -> list[dict[str, Any]]:
    """The largest found/certified ratio of every layer with an example; ``error`` where a bound was beaten."""
    rows = []
    found = {kind.__name__: example for kind, example in bounded_examples().items() if example is not None}
    for name, (make, shape) in (found | OUTER).items():
        layer = make()
        rows.append(_row(name, lambda: check_layer(layer, shape, 2.0, 1.5, steps=steps, seed=seed)))  # noqa: B023
    return rows


def audit_losses(seed: int = 0, classes: int = 5) -> list[dict[str, Any]]:
    """The same for the constant of every loss."""
    losses: list[LipschitzLoss] = [KCosine(0.7) if kind is KCosine else kind() for kind in LOSSES.values()]
    return [_row(type(loss).__name__, lambda: check_loss(loss, classes, seed=seed)) for loss in losses]  # noqa: B023


def _row(name: str, check: Callable[[], Any]) -> dict[str, Any]:
    try:
        report = check()
    except SensitivityError as error:
        return {"subject": name, "worst": None, "least": None, "passed": False, "error": str(error)}
    ratios = report.ratios.values()
    return {"subject": name, "worst": max(ratios), "least": min(ratios), "passed": True, "error": None}


def _network(job: tuple[str, bool, dict[str, Any]]) -> dict[str, Any]:
    name, full, settings = job
    return audit_network(name, networks(full)[name], **settings)


def audit_sensitivity(
    full: bool = False, train_steps: int = 500, names: Sequence[str] | None = None, seed: int = 0,
    progress: Progress | None = None, layer_steps: int = 20, workers: int = 1, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Everything; ``verdict`` is consistent, violated (a bound was beaten) or inconclusive (the control was not refuted).

    Networks are independent: with several ``workers`` each has a process of its own.
    """
    tell = progress or (lambda done, total, note: None)
    wanted = [n for n in networks(full) if names is None or n in names]
    unknown = sorted(set(names or ()) - set(networks(full)))
    if unknown:
        raise ValueError(f"no network is called {', '.join(unknown)}; there are {', '.join(networks(full))}")
    total = len(wanted) + 3
    tell(0, total, "control")
    known_wrong = control(seed)
    tell(1, total, "layers")
    layers = audit_layers(seed, layer_steps)
    tell(2, total, "losses")
    losses = audit_losses(seed)
    tell(3, total, f"networks: {train_steps} steps each, then the search")
    settings = {"train_steps": train_steps, "seed": seed, "certify_every": FULL_EVERY if full else 1, **options}
    jobs, rows = [(name, full, settings) for name in wanted], {}
    for done, (job, row) in enumerate(Pool(workers).run(_network, jobs), start=4):
        rows[job[0]] = row
        tell(done, total, f"{job[0]}: {row['error'] or format(row['worst'], '.3f')}")
    found = [rows[name] for name in wanted]
    beaten = [row["subject"] for row in (*layers, *losses, *found) if not row["passed"]]
    tight = [row["subject"] for row in layers if row["passed"] and row["least"] >= TEETH]
    verdict = "violated" if beaten else "consistent" if known_wrong["refuted"] else "inconclusive"
    worst = max((row["worst"] for row in (*layers, *losses, *found) if row["worst"] is not None), default=None)
    return {
        "mechanism": "clipless", "verdict": verdict, "worst": worst, "beaten": beaten, "tight_layers": tight,
        "control": known_wrong, "layers": layers, "losses": losses, "networks": found, "full": full, "seed": seed,
    }  # fmt: skip
