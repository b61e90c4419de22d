"""The broken things themselves: mistakes seen in public code, each at most a few lines away from something sound.

Which of them are broken is written in `zoo` alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.accounting import gaussian, poisson
from erlangen.audit.layers import Example
from erlangen.gradients.pieces import Dense, Outer
from erlangen.gradients.registry import _RULES, registered
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.lipschitz import SpectralConv2d, SpectralDense
from erlangen.mechanisms import Diagonal, Direction, Fourier, GaussianMechanism, Layerwise, PublishedGReDP, StreamNoise
from erlangen.mechanisms.clipping import AdaptiveQuantile, AutoS, Flat, PerLayer
from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate
from erlangen.sampling import PoissonSampler, ShuffledBatches

# --- mechanisms ------------------------------------------------------------------------------------------------------


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
        self.clipping.update(self._side_total, expected_batch)


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
        self._clipped_at = None
        return super().finish(expected_batch)


class NoiseOfTheFirstPart(GaussianMechanism):
    def accumulate(self, gradients: PerSampleGradients) -> None:
        super().accumulate(gradients)
        self.clipping.bound *= 0.9
        self._clipped_at = None


class SkipsEmptyBatches(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        empty = not any(bool(total.any()) for total in self._sum.values())
        return {n: t / expected_batch for n, t in self._sum.items()} if empty else super().finish(expected_batch)


class ClippedAgain(GaussianMechanism):
    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        length = torch.cat([t.flatten() for t in self._sum.values()]).norm()
        released = super().finish(expected_batch)
        return {n: g / length.clamp(min=1.0) for n, g in released.items()}


# --- clipping rules --------------------------------------------------------------------------------------------------


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


class HalfSpectrumUnweighted(Fourier):
    def weight(self, name: str) -> Any:
        return (lambda g: torch.view_as_real(torch.fft.rfft(g.float(), norm="ortho"))) if name == "conv" else None


# --- noise and samplers ----------------------------------------------------------------------------------------------


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


# --- layers ----------------------------------------------------------------------------------------------------------


class NormWithoutBias(nn.Linear):
    """Its rule forgets the bias."""


class MeanOverTokens(nn.Linear):
    """Its rule averages over tokens, where the gradient is their sum."""


def forgets_bias(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)))

    return tape.tap(out, (input,), (weight, bias), pieces)


def averages_tokens(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)) / d.shape[1])
        yield bias, Dense(d.flatten(1, -2).mean(1))

    return tape.tap(out, (input,), (weight, bias), pieces)


class NoCrossTerms(Outer):
    """Norms as if tokens were orthogonal."""

    def norms_squared(self, weight: Any = None) -> Tensor:
        return (self.a.square().sum(2) * self.d.square().sum(2)).sum(1)


def adds_up_norms(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        a, c = (t.flatten(1, -2).unflatten(0, (-1, views)).flatten(1, 2) for t in (saved[0], d))
        yield weight, NoCrossTerms(a, c)
        yield bias, Dense(c.sum(1))

    return tape.tap(out, (input,), (weight, bias), pieces)


def with_rule(kind: type[nn.Linear], rule: Any) -> Example:
    """A linear layer of its own type with this rule; None is the library's."""

    class Layer(kind):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__(5, 3)
            _RULES[type(self)] = rule or registered()[nn.Linear]

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight, self.bias)

    return Example(Layer, lambda rows: torch.randn(rows, 4, 5, generator=torch.Generator().manual_seed(rows)))


class BiasBoundWithoutArea(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"bias": g}


class PowerIterationNorm(SpectralDense):
    def symbols(self) -> None:
        """Not certified together with the others."""

    def certified_norm(self) -> Tensor:
        v = torch.ones(self.in_features, dtype=torch.float64)
        u = self.weight.detach().double() @ (v / v.norm())
        return (self.weight.detach().double().T @ (u / u.norm().clamp(min=1e-30))).norm()


class OverlapForgotten(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"weight": g * x.norm}


# --- companions ------------------------------------------------------------------------------------------------------


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
