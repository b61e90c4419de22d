"""Broken clipping rules, each a few lines away from a sound one."""

from __future__ import annotations

from torch import Tensor

from erlangen.mechanisms.clipping import AdaptiveQuantile, AutoS, Flat, PerLayer


class PerLayerCountedOnce(PerLayer):
    def weights(self, norms: Tensor) -> Tensor:
        return (self.safe_bound(norms) / norms).clamp(max=1.0)


class AutoSWithoutClip(AutoS):
    def weights(self, norms: Tensor) -> Tensor:
        return self.safe_bound(norms) / norms.clamp(min=self.gamma) + self.gamma


class CountNotPaidFor(AdaptiveQuantile):
    def gradient_multiplier(self, noise_multiplier: float) -> float:
        return noise_multiplier


class SoftClip(Flat):
    def weights(self, norms: Tensor) -> Tensor:
        return self.bound / norms.clamp(min=self.bound).sqrt().square().clamp(max=1e6)


class FactorInHalfPrecision(Flat):
    def weights(self, norms: Tensor) -> Tensor:
        return (self.bound / norms).clamp(max=1.0).bfloat16().to(norms)


class SquaredNormAgainstBound(Flat):
    def weights(self, norms: Tensor) -> Tensor:
        return (self.safe_bound(norms) / norms.square()).clamp(max=1.0)


class LargestLayerNorm(PerLayer):
    def weights(self, norms: Tensor) -> Tensor:
        return (self.safe_bound(norms) / norms.amax(0, keepdim=True)).clamp(max=1.0).expand_as(norms)


class AnyGamma(AutoS):
    def __init__(self, bound: float, gamma: float = 0.01) -> None:
        super().__init__(bound)
        self.gamma = gamma


class NoGamma(AutoS):
    def weights(self, norms: Tensor) -> Tensor:
        return self.safe_bound(norms) / norms
