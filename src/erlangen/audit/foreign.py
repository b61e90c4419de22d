"""Audits of code that is not ours: Opacus's optimizer, and anything that can be imported.

A foreign mechanism needs two methods: ``release(gradients) -> gradients`` from per-sample gradients [n, *shape], and ``event()``.
A foreign training function takes (x, y) and returns a model; see `membership`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.accounting import gaussian
from erlangen.audit.montecarlo import Subject

SHAPES: Mapping[str, torch.Size] = {"weight": torch.Size([3, 2]), "bias": torch.Size([3])}


class OpacusOptimizer:
    """One step of `opacus.optimizers.DPOptimizer` as a release: per-sample gradients in, ``p.grad`` out."""

    def __init__(self, sigma: float, bound: float, seed: int = 0) -> None:
        try:
            from opacus.optimizers import DPOptimizer
        except ImportError as error:
            raise ImportError("auditing Opacus needs it installed: pip install opacus") from error
        self.sigma = sigma
        self.parameters = {n: nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=0.0), noise_multiplier=sigma, max_grad_norm=bound,
            expected_batch_size=4, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def release(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        for name, p in self.parameters.items():
            p.grad_sample = gradients[name].clone()  # type: ignore[attr-defined]
        self.optimizer.pre_step()
        return {n: p.grad.detach().clone() for n, p in self.parameters.items()}  # type: ignore[union-attr]

    def event(self) -> Any:
        return gaussian(self.sigma)


def opacus_subject(sigma: float, bound: float = 1.0, seed: int = 0) -> Subject:
    return Subject("opacus DPOptimizer", lambda: OpacusOptimizer(sigma, bound, seed=seed), SHAPES)


def imported(path: str) -> Callable[..., Any]:
    """``package.module:name``"""
    module, colon, name = path.partition(":")
    if not colon or not name:
        raise ValueError(f"{path!r} does not name a function; write package.module:function")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"{module} cannot be imported: {type(error).__name__}: {error}; put its folder on PYTHONPATH, or correct the name"
        ) from error
    if not callable(found):
        raise ValueError(f"{module} has no function {name!r}")
    return found


def imported_subject(path: str) -> Subject:
    """A factory ``build() -> mechanism`` with an attribute ``shapes`` (on it or on what it builds), parameter shapes by name."""
    build = imported(path)
    shapes = getattr(build, "shapes", None) or getattr(build(), "shapes", None)
    if not shapes:
        raise ValueError(f"{path} says no parameter shapes; set {path.partition(':')[2]}.shapes = {{'w': (3, 2)}}")
    return Subject(path, build, {n: torch.Size(s) for n, s in shapes.items()})
