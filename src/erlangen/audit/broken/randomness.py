"""Broken noise sources and samplers, each a few lines away from a sound one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from erlangen.accounting import poisson
from erlangen.mechanisms import StreamNoise
from erlangen.sampling import PoissonSampler, ShuffledBatches


class SameOnEveryRank(StreamNoise):
    def __init__(self, seed: int | None = None, run_id: str = "", rank: int = 0) -> None:
        super().__init__(seed, run_id, 0)


class SameInEveryRun(StreamNoise):
    def __init__(self, seed: int | None = None, run_id: str = "", rank: int = 0) -> None:
        super().__init__(seed, "", rank)


class SeedReusedAfterResume(StreamNoise):
    def load_state_dict(self, state: Any) -> None:
        self._step = -1


class SameEveryStep(StreamNoise):
    def next_release(self) -> None:
        self._step, self._generators = 0, {}


class SameForEveryLayer(StreamNoise):
    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        self._generators = {}
        return super().perturb(value, std)


class UniformNoise(StreamNoise):
    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        g = self._generators.setdefault(value.device, self._stream.at(self._step, value.device))
        return value + (torch.rand(value.shape, generator=g, dtype=value.dtype) - 0.5) * math.sqrt(12.0) * std


class SeededByStep(StreamNoise):
    def next_release(self) -> None:
        super().next_release()
        self._generators = {torch.device("cpu"): torch.Generator().manual_seed(self._step)}


class CutTails(StreamNoise):
    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        noise = super().perturb(torch.zeros_like(value), 1.0)
        return value + noise.clamp(-2.0, 2.0) * std


class NoiseInHalfPrecision(StreamNoise):
    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        noise = super().perturb(torch.zeros_like(value), 1.0)
        return (value.bfloat16() + (noise * std).bfloat16()).to(value)


class FixedBatchesAsPoisson(ShuffledBatches):
    def event(self, release: Any) -> Any:
        return poisson(self.sample_rate, release)


class NoEmptyBatch(PoissonSampler):
    def _draw(self, step: int) -> Tensor:
        batch = super()._draw(step)
        return batch if len(batch) else torch.randint(0, self.units, (1,), generator=self._stream.at(-step - 1))


class TruncatedBatch(PoissonSampler):
    def _draw(self, step: int) -> Tensor:
        return super()._draw(step)[: int(self.expected_batch) + 1]


class SameBatchesEveryEpoch(PoissonSampler):
    def _draw(self, step: int) -> Tensor:
        return super()._draw(step % self.steps_per_epoch)


class DrawsAgainAfterResume(PoissonSampler):
    def load_state_dict(self, state: Any) -> None:
        self.step = 0


class RateUnderstated(PoissonSampler):
    def event(self, release: Any) -> Any:
        return poisson(self.sample_rate / 2, release)


class RateOfTheLoader(PoissonSampler):
    def event(self, release: Any) -> Any:
        return poisson(1.0 / math.ceil(self.units / self.expected_batch), release)


class WithReplacement(PoissonSampler):
    def _draw(self, step: int) -> Tensor:
        return torch.randint(0, self.units, (len(super()._draw(step)),), generator=self._stream.at(-step - 1))


class SkipsRecordsOfTheLastBatch(PoissonSampler):
    def _draw(self, step: int) -> Tensor:
        batch, self.before = super()._draw(step), getattr(self, "before", torch.zeros(0))
        self.before = batch[~torch.isin(batch, self.before)]
        return self.before
