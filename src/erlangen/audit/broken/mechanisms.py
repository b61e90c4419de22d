"""Broken mechanisms and geometries, each a few lines away from a sound one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from erlangen.accounting import gaussian
from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import Diagonal, Direction, Fourier, GaussianMechanism, Layerwise, PublishedGReDP


class OneLayerForgotten(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        last = list(self._sum)[-1]
        plain = self._sum[last] / expected_batch
        return super().finish(expected_batch) | {last: plain}


class LastBinForgotten(Layerwise):
    def noisy(self, name: str, total: Tensor) -> Tensor:
        c = self.geometry.forward(name, total).clone()
        c[..., :-1] = self.noise.perturb(c[..., :-1], self.layer_std(name))
        return self.geometry.inverse(name, c)


class NoiseByRealisedBatch(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients)
        self.noise_scale = math.sqrt(gradients.owners / self.expected_batch)

    @property
    def std(self) -> float:
        return super().std * getattr(self, "noise_scale", 1.0)


class DividedByRealisedBatch(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients)
        self.realised = max(1, gradients.owners)

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        return super().finish(self.realised)


class ClipAfterMean(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        mean = {n: gradients.dense(n).sum(0, keepdim=True) / self.expected_batch for n in gradients.names}
        super().accumulate(PerSampleGradients.from_dense({n: g * self.expected_batch for n, g in mean.items()}))


class UnclippedBatch(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        for name in gradients.names:
            self._sum[name] += gradients.dense(name).nan_to_num(0.0, 0.0, 0.0).sum(0)


class NanPasses(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        bad = torch.stack([~torch.isfinite(gradients.dense(n).flatten(1)).all(1) for n in gradients.names]).any(0)
        super().accumulate(gradients)
        self._sum["head"] += math.nan if bool(bad.any()) else 0.0


class StdIsVariance(GaussianMechanism):
    @property
    def std(self) -> float:
        return (self.noise_multiplier * self.clipping.sensitivity) ** 2


class DataDependentMetric(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        rms = {n: gradients.dense(n).nan_to_num(0.0, 0.0, 0.0).square().sum(0).sqrt() + 0.1 for n in gradients.names}
        self.geometry = Diagonal(rms)
        super().accumulate(gradients)


class ForgetsNextRelease(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self.noise.load_state_dict({"step": -1})
        return super().finish(expected_batch)


class Shards(GaussianMechanism):
    """Sound: parameters are shared out among processes, and each draws from a stream of its own."""

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        whole, released = dict(self._sum), dict[str, Tensor]()
        for name, total in whole.items():
            self._sum = {name: total}
            released |= super().finish(expected_batch)
        return released


class ShardsShareNoise(Shards):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        start, next_release = self.noise.state_dict(), self.noise.next_release
        self.noise.next_release = lambda: (self.noise.load_state_dict(start), next_release())  # type: ignore
        released = super().finish(expected_batch)
        del self.noise.next_release
        return released


class HalfComplexNoise(PublishedGReDP):
    def event(self, noise_multiplier: float | None = None) -> Any:
        return gaussian(self.noise_multiplier)


class CountReleasedAsItIs(GaussianMechanism):
    def _adapt(self, expected_batch: float) -> None:
        self.clipping.update(float(self._side_total), expected_batch)


class UnclippedMagnitude(Direction):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients)
        norms = sum((s for s in gradients.norms_squared().values()), torch.zeros(gradients.owners)).sqrt()
        self._magnitude = norms.nan_to_num(0.0, 0.0, 0.0).double().sum()


class OrInsteadOfComposition(Direction):
    @property
    def direction_std(self) -> float:
        return self.noise_multiplier

    @property
    def magnitude_std(self) -> float:
        return self.noise_multiplier * self.clipping.bound


class SubsampledNoise(GaussianMechanism):
    def event(self, noise_multiplier: float | None = None) -> Any:
        return gaussian((self.noise_multiplier if noise_multiplier is None else noise_multiplier) * 1.5)


class NoiseOfTheMean(GaussianMechanism):
    @property
    def std(self) -> float:
        return super().std / self.expected_batch


class QuantileBeforeNoise(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self.clipping.update(expected_batch, expected_batch)
        self.clipped_at = None
        return super().finish(expected_batch)


class NoiseOfTheFirstPart(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients)
        self.clipping.bound *= 0.9
        self.clipped_at = None


class SkipsEmptyBatches(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        empty = not any(bool(total.any()) for total in self._sum.values())
        return {n: t / expected_batch for n, t in self._sum.items()} if empty else super().finish(expected_batch)


class ClippedAgain(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        length = torch.cat([t.flatten() for t in self._sum.values()]).norm()
        released = super().finish(expected_batch)
        return {n: g / length.clamp(min=1.0) for n, g in released.items()}


class HalfSpectrumUnweighted(Fourier):
    def weight(self, name: str) -> Any:
        return (lambda g: torch.view_as_real(torch.fft.rfft(g.float(), norm="ortho"))) if name == "conv" else None
