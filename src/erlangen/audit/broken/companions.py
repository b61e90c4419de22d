"""Broken companions of a mechanism, each a few lines away from a sound one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate
from erlangen.sampling import PoissonSampler


class RejectionsAreFree(SelectiveUpdate):
    def decide(self, before: Tensor, after: Tensor) -> bool:
        pay, self.record = self.record, lambda event: None
        accepted = super().decide(before, after)
        self.record = pay
        if accepted:
            self.record(self.event())
        return accepted


class ChangeNotClipped(SelectiveUpdate):
    def decide(self, before: Tensor, after: Tensor) -> bool:
        self.record(self.event())
        self.noise.next_release()
        total = (after - before).double().nan_to_num(0.0, 0.0, 0.0).sum().reshape(1)
        return float(self.noise.perturb(total, self.noise_multiplier * self.bound)) < self.threshold


class MeanOverRealisedJudges(SelectiveUpdate):
    def decide(self, before: Tensor, after: Tensor) -> bool:
        self.sampler.expected_batch = float(max(1, len(before)))
        return super().decide(before, after)


class JudgesAreTheBatch(SelectiveUpdate):
    def __init__(self, units: int, expected_batch: float, noise_multiplier: float, record: Any, bound: float = 1.0,
                 threshold: float = 0.0, seed: int | None = None, run_id: str = "") -> None:  # fmt: skip
        super().__init__(units, expected_batch, noise_multiplier, record, bound, threshold, seed, run_id)
        self.sampler = PoissonSampler(units, expected_batch, seed, run_id)


class RatesShareASum(ImportanceSampling):
    def probabilities(self, norms: Tensor) -> Tensor:
        p = super().probabilities(norms)
        return (p * self.max_rate * p.numel() / p.sum()).clamp(max=self.max_rate)


class RateAboveThePrice(ImportanceSampling):
    def probabilities(self, norms: Tensor) -> Tensor:
        return (super().probabilities(norms) * 1.5).clamp(max=1.0)


class DrawsRepeat(ImportanceSampling):
    def draw(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        self.step %= 7
        return super().draw(norms)
