"""Whole networks under attack, at weights that training walks through: what a sensitivity audit of clipless runs.

Bounds hold for all weights inside the constraints, but weights at initialisation are special. So each network is
first trained by noisy, projected steps on made-up data; then the search looks for a sample whose gradient is too large,
at those weights and at weights that it may move itself, in float64 and in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from erlangen.lipschitz.compose import Sequential
from erlangen.lipschitz.inputs import BoundedInput
from erlangen.lipschitz.losses import CrossEntropy, LipschitzLoss
from erlangen.lipschitz.projection import Projector
from erlangen.lipschitz.search import SensitivityError, SensitivityReport, check_sensitivity

CLASSES = 4


def networks(full: bool = False) -> dict[str, Callable[[], Sequential]]:
    """LeNet, VGG, ResNet and Mixer: as they are used (``full``), or narrow and on small images."""
    from erlangen.models.lipschitz import lipschitz_lenet, lipschitz_mixer, lipschitz_resnet, lipschitz_vgg

    if full:
        return {
            "lenet": lambda: lipschitz_lenet(classes=CLASSES),
            "vgg": lambda: lipschitz_vgg(classes=CLASSES),
            "resnet": lambda: lipschitz_resnet(classes=CLASSES),
            "mixer": lambda: lipschitz_mixer(classes=CLASSES),
        }
    shape = (3, 8, 8)
    return {
        "lenet": lambda: lipschitz_lenet((1, 8, 8), CLASSES, bound=3.0, width=4),
        "vgg": lambda: lipschitz_vgg(shape, CLASSES, size=(6, 8, 10), bound=3.0, centre=True, colour="yuv"),
        "resnet": lambda: lipschitz_resnet(shape, CLASSES, width=4, blocks=1, bound=3.0),
        "mixer": lambda: lipschitz_mixer(shape, CLASSES, width=8, blocks=1, bound=3.0, backward_clip=1.0),
    }


def trained(
    net: Sequential, loss: LipschitzLoss, steps: int, lr: float = 0.05, certify_every: int = 1, seed: int = 0
) -> Sequential:
    """The network after ``steps`` normalised, noisy and projected steps on random data, in place."""
    generator, project = torch.Generator().manual_seed(seed), Projector(net, certify_every)
    first = net[0]
    assert isinstance(first, BoundedInput)
    for _ in range(steps):
        x = torch.randn(8, *first.shape, generator=generator)
        y = torch.randint(CLASSES, (8,), generator=generator)
        net.zero_grad()
        loss(net(x), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                noise = torch.randn(p.shape, generator=generator) / p.numel() ** 0.5
                p.sub_(lr * (p.grad / (p.grad.norm() + 1e-12) + 0.3 * noise))
        project()
    return net


def audit_network(
    name: str, make: Callable[[], Sequential], *, train_steps: int = 500, steps: int = 15, restarts: int = 8,
    certify_every: int = 1, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train, attack, report: JSON-able, with ``passed`` false if any bound was beaten."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = CrossEntropy(10.0)
        net = trained(make(), loss, train_steps, certify_every=certify_every, seed=seed)
    ratios: dict[str, float] = {}
    evaluations, error = 0, None
    for moving in (False, True):
        for dtype in (torch.float64, torch.float32):
            try:
                report = check_sensitivity(
                    net, loss, steps=steps, restarts=restarts, move_weights=moving, seed=seed, dtype=dtype,
                    certify_every=certify_every,
                )  # fmt: skip
            except SensitivityError as refuted:
                error = str(refuted)
                continue
            evaluations += report.evaluations
            ratios = {key: max(ratio, ratios.get(key, 0.0)) for key, ratio in report.ratios.items()}
    summary = SensitivityReport(name, ratios, evaluations)
    verdict = {"worst": summary.worst, "train_steps": train_steps, "passed": error is None, "error": error}
    verdict |= {"parameters": sum(p.numel() for p in net.parameters()), "certify_every": certify_every}
    return {**asdict(summary), **verdict}
