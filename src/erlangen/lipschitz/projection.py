"""Keeping a network inside its constraints: projection after every step, checked before every use.

A full certification costs some linear algebra per layer, independent of the batch. Between two of them the triangle
inequality is enough: ‖W‖ ≤ ‖W_ref‖ + c·‖W − W_ref‖_F (c = 1 dense, √(⌈kh/sh⌉⌈kw/sw⌉) for convolutions) is as certified,
looser, and nearly free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from erlangen.lipschitz.base import MARGIN, Constrained
from erlangen.lipschitz.compose import layers


@dataclass(frozen=True)
class Certificate:
    """A weight and a bound on its operator norm, both at the time of the last full certification."""

    weight: Tensor
    bound: Tensor


class Projector:
    """Projects a network; certifies fully every ``every`` calls and by the triangle inequality in between."""

    def __init__(self, network: nn.Module, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"certify_every is {every}; certify every step (1) or every few")
        self.network, self.every = network, every
        self._calls = 0
        self._certificates: dict[str, Certificate] = {}
        self._seen: list[tuple[int, int]] = []

    @torch.no_grad()
    def __call__(self) -> None:
        """After this every bound of every layer holds."""
        full = self._calls % self.every == 0
        for path, layer in layers(self.network):
            if self.every == 1 or not isinstance(layer, Constrained):
                layer.project()
            elif full or path not in self._certificates:
                layer.project()
                self._certificates[path] = Certificate(layer.weight.detach().clone(), layer.certified_norm())
            else:
                layer.shrink(self.between(path, layer))
        self._calls += 1
        self._seen = self._versions()

    def between(self, path: str, layer: Constrained) -> Tensor:
        """The bound by the triangle inequality."""
        last = self._certificates[path]
        moved = (layer.weight.detach().double() - last.weight.double()).norm()
        return (last.bound + layer.frobenius_factor() * moved) * MARGIN

    def ensure(self) -> None:
        """Project again if any parameter was written to since (a loaded checkpoint, an optimizer of the user's own)."""
        if self._versions() != self._seen:
            self._calls = 0
            self()

    def _versions(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self.network.parameters()]
