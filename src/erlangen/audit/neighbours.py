"""Pairs of neighbouring batches for per-sample gradients: a canary record, and the others it joins.

No pair is told which mechanism it will meet. Canaries are far above any clipping bound, so that clipping brings them to it;
each direction below is the worst for some mistake: one coordinate (noise forgotten there), one parameter (a layer without
noise), odd, constant and alternating sequences (Fourier coordinates), all parameters at once (per-layer clipping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = dict[str, Tensor]
HUGE = 1e4
#: up to this many coordinates each gets a canary of its own
FEW = 40


@dataclass(frozen=True)
class Pair:
    """Others [n, …] without and with one canary."""

    name: str
    others: Gradients
    canary: Gradients

    @property
    def joined(self) -> Gradients:
        return {n: torch.cat([g, self.canary[n]]) for n, g in self.others.items()}


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """One vector; of sharded tensors, what this process holds."""
    return torch.cat([(t.to_local() if hasattr(t, "to_local") else t).reshape(-1) for t in tensors.values()])


def unflatten(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Gradients:
    """[n, d] → {name: [n, *shape]}"""
    parts = flat.split([s.numel() for s in shapes.values()], 1)
    return {n: p.reshape(flat.shape[0], *s) for (n, s), p in zip(shapes.items(), parts, strict=True)}


def directions(shapes: Mapping[str, torch.Size], seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Named unit vectors over all parameters."""
    d = sum(s.numel() for s in shapes.values())
    g = torch.Generator().manual_seed(seed)
    unit = lambda v: v / v.norm().clamp(min=1e-30)  # noqa: E731
    yield "random", unit(torch.randn(d, generator=g))
    yield "every parameter at full size", unit(_each(shapes, lambda n: unit(torch.randn(n, generator=g))))
    for name, start, shape in _blocks(shapes):
        size = shape.numel()
        for kind, v in _waves(shape):
            flat = torch.zeros(d)
            flat[start : start + size] = v.reshape(-1)
            yield f"{name}: {kind}", unit(flat)
    for k in range(d) if d <= FEW else sorted({0, 1, d - 2, d - 1}):
        yield f"coordinate {k}", _axis(d, k)


def _axis(d: int, k: int) -> Tensor:
    v = torch.zeros(d)
    v[k] = 1.0
    return v


def _each(shapes: Mapping[str, torch.Size], make: Callable[[int], Tensor]) -> Tensor:
    return torch.cat([make(s.numel()) for s in shapes.values()])


def _blocks(shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, int, torch.Size]]:
    start = 0
    for name, shape in shapes.items():
        yield name, start, shape
        start += shape.numel()


def _waves(shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Constant, alternating and odd sequences along the last axis."""
    n = shape[-1] if len(shape) else 1
    k = torch.arange(n, dtype=torch.float32)
    yield "constant", torch.ones(n).expand(shape)
    if n > 1:
        yield "alternating", (1.0 - 2.0 * (k % 2)).expand(shape)
    if n > 2:
        yield "odd", torch.sin(2 * math.pi * k / n).expand(shape)


def portfolio(shapes: Mapping[str, torch.Size], seed: int = 0) -> list[Pair]:
    """Every direction alone; against others that nearly cancel it; among a few ordinary records; and one broken record."""
    pairs = []
    d = sum(s.numel() for s in shapes.values())
    nobody = torch.zeros(0, d)
    crowd = torch.randn(3, d, generator=torch.Generator().manual_seed(seed + 1))
    for k, (name, v) in enumerate(directions(shapes, seed)):
        canary = HUGE * v[None]
        contexts = {"alone": nobody}
        if k < 2 or d > FEW:
            beside = torch.roll(v, 1)[None] * 0.5
            contexts |= {
                "among others": crowd,
                "against a small record": -0.5 * v[None],
                "beside a small record": beside,
            }
        for context, others in contexts.items():
            pairs.append(Pair(f"{name}, {context}", unflatten(others, shapes), unflatten(canary, shapes)))
    pairs.append(Pair("not a number", unflatten(crowd, shapes), unflatten(torch.full((1, d), math.nan), shapes)))
    return pairs
