"""Gaussian noise from two kinds of source: reproducible streams, and the operating system's cryptographic generator.

What `SecureNoise` answers. Adding a floating-point Gaussian to a floating-point value leaves traces of the value in the
low bits of the result (Mironov 2012, and its Gaussian versions): some outputs can only come from one of two inputs.
Here value and noise are both rounded in float64 to multiples of a grid step 2⁻⁴⁰·std before they are added, so that
the sum is exact and every multiple can come from every value; and the random bits cannot be predicted from earlier ones.
Rounding moves the value by at most 2⁻⁴¹·std per coordinate, 2⁻⁴⁰·σ·√d of the sensitivity between neighbours (1e-9·σ for
a million parameters), which the outward rounding of every clipping rule covers 3000 times over. What it does not
answer: timing and other side channels of the machine, and whoever can read its memory.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from erlangen.streams import Stream, fill_normal, secure_uniform

GRID = 2.0**-40


class NoiseSource(ABC):
    """Adds independent Gaussian noise. `next_release` opens the stream of one logical batch."""

    secure: bool
    description: str

    @abstractmethod
    def next_release(self) -> None:
        """Noise drawn from now on belongs to a new release and is never drawn again."""

    @abstractmethod
    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        """value + N(0, std²) on every coordinate."""

    def perturb_all(self, values: Sequence[Tensor], std: float) -> list[Tensor]:
        """Each of them perturbed, independently."""
        return [self.perturb(value, std) for value in values]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore unless a subclass says so."""


class StreamNoise(NoiseSource):
    """Pseudo-random noise from a derived stream: exactly reproducible when a seed is given."""

    secure = False

    def __init__(self, seed: int | None = None, run_id: str = "", rank: int = 0, purpose: str = "noise") -> None:
        self._stream = Stream(purpose, seed, run_id, rank)
        self._step = -1
        self.seeded = seed is not None
        self._generators: dict[torch.device, torch.Generator] = {}
        self.description = "reproducible: not for release" if seed is not None else "pseudo-random, unseeded"

    def next_release(self) -> None:
        self._step += 1
        self._generators = {}

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        noise = fill_normal(torch.empty_like(value, memory_format=torch.contiguous_format), self._generator(value.device))
        return torch.addcmul(value, noise, std) if isinstance(std, Tensor) else value + noise.mul_(std)

    @torch.no_grad()  # sums may carry a graph, which nothing after the noise follows
    def perturb_all(self, values: Sequence[Tensor], std: float) -> list[Tensor]:
        """In one pass over one buffer: a few launches, however many tensors there are. Only a seed asks for a draw for each, so
        that every tensor has the noise that `perturb` would give it, as it has in a run on shards."""
        kinds = {(value.device, value.dtype) for value in values}
        if len(kinds) != 1 or getattr(self.perturb, "__func__", None) is not StreamNoise.perturb:  # it has a way of its own
            return super().perturb_all(values, std)
        ((device, dtype),) = kinds
        noise = torch.empty(sum(value.numel() for value in values), device=device, dtype=dtype)
        parts = noise.split([value.numel() for value in values])
        for part in parts if self.seeded else [noise]:
            fill_normal(part, self._generator(device))
        noise.mul_(std)
        laid = [_laid_out(part, value) for part, value in zip(parts, values, strict=True)]
        torch._foreach_add_(laid, list(values))
        return laid

    def _generator(self, device: torch.device) -> torch.Generator:
        """Of the release that is open."""
        if self._step < 0:
            raise RuntimeError("noise was asked for before next_release(): open a release first")
        if device not in self._generators:
            self._generators[device] = self._stream.at(self._step, device)
        return self._generators[device]

    def __getstate__(self) -> dict[str, Any]:
        """Copies draw from streams of their own, in the middle of a release too."""
        return self.__dict__ if self.seeded else {**self.__dict__, "_generators": {}}

    def __copy__(self) -> StreamNoise:
        return copy.deepcopy(self)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Without a seed a run that is set back goes on with noise that was never drawn: on other weights the same noise
        again would leave the difference of two gradients bare."""
        self._step = int(state["step"]) if self.seeded else max(self._step, int(state["step"]))


class SecureNoise(NoiseSource):
    """Noise from the operating system's generator on a fixed grid; see the top of this file."""

    secure = True
    description = "secure"

    def next_release(self) -> None:
        """Every draw is fresh anyway."""

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        if value.numel() == 0:
            return value
        spread = torch.as_tensor(std, dtype=torch.float64, device="cpu").expand(value.shape)
        step = torch.where(spread > 0, _power_of_two(spread * GRID), 1.0)
        exact = value.detach().to("cpu", torch.float64)
        noisy = torch.round(exact / step) * step + torch.round(secure_normal(value.shape) * spread / step) * step
        return torch.where(spread > 0, noisy, exact).to(value.device, value.dtype)


def _laid_out(entries: Tensor, like: Tensor) -> Tensor:
    """A vector of entries as a tensor of this shape, first axis slowest, that lies in memory as ``like`` does: which coordinate
    gets which entry is not a matter of memory, so that one process and several draw alike."""
    entries = entries.view(like.shape)
    return entries if like.is_contiguous() else torch.empty_like(like).copy_(entries)


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above x, so that dividing by it is exact."""
    return torch.exp2(torch.floor(torch.log2(x)))


def secure_normal(shape: torch.Size) -> Tensor:
    """Standard normal float64 by Box–Muller over secure uniforms."""
    count = math.prod(shape)
    half = (count + 1) // 2
    radius = torch.sqrt(-2.0 * torch.log(secure_uniform(half)))
    angle = 2.0 * math.pi * secure_uniform(half)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count].view(shape)
