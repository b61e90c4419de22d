"""Deliberately broken mechanisms, rules, samplers, sources and layers, each beside its sound twin.

Every one is a mistake seen in public code, and at most three lines away from something sound. `examine` does not know which is
which: it runs the audits of the specimen's kind and says what it found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.accounting import gaussian, poisson
from erlangen.audit.clipping import audit_clipping
from erlangen.audit.flow import audit_flow
from erlangen.audit.layers import Example, audit_layer
from erlangen.audit.montecarlo import Subject, audit_releases
from erlangen.audit.randomness import audit_noise, audit_sampler
from erlangen.audit.static import audit_bounds
from erlangen.audit.verdict import Finding
from erlangen.gradients.pieces import Dense
from erlangen.gradients.registry import _RULES
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.lipschitz import SpectralConv2d, SpectralDense
from erlangen.mechanisms import (
    Diagonal,
    Direction,
    Fourier,
    GaussianMechanism,
    Layerwise,
    Mechanism,
    PublishedGReDP,
    StreamNoise,
)
from erlangen.mechanisms.clipping import AdaptiveQuantile, AutoS, Flat, PerLayer
from erlangen.sampling import PoissonSampler, ShuffledBatches

SHAPES = {"conv": torch.Size([1, 1, 5]), "head": torch.Size([3])}
BOUND, SIGMA, BATCH = 0.7, 1.0, 4.0


@dataclass(frozen=True)
class Specimen:
    """``kind`` says which audits apply; ``make`` builds the thing; ``bug`` is empty for a sound one."""

    name: str
    kind: str
    make: Callable[..., Any]
    bug: str = ""

    @property
    def sound(self) -> bool:
        return not self.bug


def examine(specimen: Specimen, trials: int = 1000, static: bool = True, seed: int = 0) -> list[Finding]:
    """All audits of this kind of thing. Mechanisms face the Monte Carlo attack too; ``static=False`` leaves only that."""
    make, name = specimen.make, specimen.name
    if specimen.kind == "mechanism":
        build = lambda: bound_to(make())  # noqa: E731
        found = [audit_flow(name, build, SHAPES, BOUND)] if static else []
        return [*found, audit_releases(Subject(name, build, SHAPES), trials, pilot=300, seed=seed)]
    if specimen.kind == "clipping":
        build = lambda: bound_to(GaussianMechanism(SIGMA, make(BOUND), noise=StreamNoise(1)))  # noqa: E731
        return [audit_clipping(name, make), audit_flow(name, build, SHAPES, BOUND)]
    if specimen.kind == "noise":
        return [audit_noise(name, make)]
    if specimen.kind == "sampler":
        return [audit_sampler(name, make)]
    if specimen.kind == "layer rule":
        before = dict(_RULES)
        try:
            return [audit_layer(name, make())]
        finally:  # the zoo must not infect the registry
            _RULES.clear()
            _RULES.update(before)
    return [audit_bounds(name, *make())]


def bound_to(mechanism: Mechanism) -> Mechanism:
    mechanism.bind({n: torch.zeros(s) for n, s in SHAPES.items()}, BATCH)
    return mechanism


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


# --- layers ----------------------------------------------------------------------------------------------------------


class NormWithoutBias(nn.Linear):
    """Its rule forgets the bias."""


class MeanOverTokens(nn.Linear):
    """Its rule averages over tokens, where the gradient is their sum."""


def _forgets_bias(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)))

    return tape.tap(out, (input,), (weight, bias), pieces)


def _averages_tokens(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    out = nn.functional.linear(input, weight.detach(), bias.detach())

    def pieces(saved: tuple[Tensor, ...], d: Tensor, views: int) -> Any:
        yield weight, Dense(torch.einsum("nto,nti->noi", d.flatten(1, -2), saved[0].flatten(1, -2)) / d.shape[1])
        yield bias, Dense(d.flatten(1, -2).mean(1))

    return tape.tap(out, (input,), (weight, bias), pieces)


def _with_rule(kind: type[nn.Linear], rule: Any) -> Example:
    """A linear layer of its own type with this rule; None is the library's."""

    class Layer(kind):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__(5, 3)
            _RULES[type(self)] = rule or _RULES[nn.Linear]

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight, self.bias)

    return Example(Layer, lambda rows: torch.randn(rows, 4, 5, generator=torch.Generator().manual_seed(rows)))


class BiasBoundWithoutArea(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"bias": g}


class PowerIterationNorm(SpectralDense):
    def certified_norm(self) -> Tensor:
        v = torch.ones(self.in_features, dtype=torch.float64)
        u = self.weight.detach().double() @ (v / v.norm())
        return (self.weight.detach().double().T @ (u / u.norm().clamp(min=1e-30))).norm()


class OverlapForgotten(SpectralConv2d):
    def parameter_bound(self, x: Any, g: float) -> dict[str, float]:
        return super().parameter_bound(x, g) | {"weight": g * x.norm}


def _iso(kind: type[GaussianMechanism] = GaussianMechanism, **options: Any) -> Callable[[], Mechanism]:
    return lambda: kind(SIGMA, BOUND, noise=StreamNoise(1), **options)


def zoo() -> list[Specimen]:
    """Every specimen, sound and broken, in no telling order."""
    plain = lambda kind: lambda seed, run, rank: kind(seed, run, rank)  # noqa: E731
    sampler = lambda kind: lambda n, b, seed, run: kind(n, b, seed, run)  # noqa: E731
    adaptive = lambda kind: lambda: kind(SIGMA, AdaptiveQuantile(BOUND), noise=StreamNoise(1))  # noqa: E731
    return [
        Specimen("iso", "mechanism", _iso()),
        Specimen("one layer forgotten", "mechanism", _iso(OneLayerForgotten), "no noise on one layer"),
        Specimen("spectral", "mechanism", lambda: GaussianMechanism(SIGMA, BOUND, Fourier(0.5), StreamNoise(1))),
        Specimen("last bin forgotten", "mechanism", lambda: LastBinForgotten(SIGMA, BOUND, Fourier(), StreamNoise(1)),
                 "no noise on the last frequency"),
        Specimen("noise by realised batch", "mechanism", _iso(NoiseByRealisedBatch), "noise scaled by the realised batch"),
        Specimen("divided by realised batch", "mechanism", _iso(DividedByRealisedBatch), "mean over the realised batch"),
        Specimen("clip after mean", "mechanism", _iso(ClipAfterMean), "the mean is clipped, not each record"),
        Specimen("no clip", "mechanism", _iso(UnclippedBatch), "nothing is clipped"),
        Specimen("not a number passes", "mechanism", _iso(NanPasses), "one bad record shows in the release"),
        Specimen("variance for std", "mechanism", _iso(StdIsVariance), "σ²C² used as a standard deviation"),
        Specimen("rep", "mechanism", lambda: GaussianMechanism(
            SIGMA, BOUND, Diagonal({n: torch.linspace(0.5, 2, s.numel()).view(s) for n, s in SHAPES.items()}), StreamNoise(1))),
        Specimen("metric from the batch", "mechanism", _iso(DataDependentMetric), "the metric depends on the records"),
        Specimen("noise repeats", "mechanism", _iso(ForgetsNextRelease), "every release has the same noise"),
        Specimen("gredp complex, priced truly", "mechanism", lambda: PublishedGReDP(SIGMA, BOUND, Fourier(), StreamNoise(1))),
        Specimen("gredp complex, as claimed", "mechanism", lambda: HalfComplexNoise(SIGMA, BOUND, Fourier(), StreamNoise(1)),
                 "half the noise, priced as all of it"),
        Specimen("half spectrum unweighted", "mechanism", lambda: GaussianMechanism(
            SIGMA, BOUND, HalfSpectrumUnweighted(), StreamNoise(1)), "norms from an unweighted half spectrum"),
        Specimen("adaptive", "mechanism", adaptive(GaussianMechanism)),
        Specimen("count released as it is", "mechanism", adaptive(CountReleasedAsItIs), "the quantile is estimated without noise"),
        Specimen("geodp direction", "mechanism", lambda: Direction(SIGMA, BOUND, StreamNoise(1))),
        Specimen("geodp, magnitude unclipped", "mechanism", lambda: UnclippedMagnitude(SIGMA, BOUND, StreamNoise(1)),
                 "the magnitude is not clipped"),
        Specimen("geodp, or for and", "mechanism", lambda: OrInsteadOfComposition(SIGMA, BOUND, StreamNoise(1)),
                 "two releases priced as one"),
        Specimen("optimistic event", "mechanism", _iso(SubsampledNoise), "the event claims more noise than there is"),
        Specimen("flat", "clipping", Flat),
        Specimen("per-layer", "clipping", PerLayer),
        Specimen("per-layer counted once", "clipping", PerLayerCountedOnce, "every layer clipped at C, accounted as one"),
        Specimen("auto-s", "clipping", AutoS),
        Specimen("auto-s, γ outside", "clipping", AutoSWithoutClip, "C/‖g‖ + γ"),
        Specimen("adaptive quantile", "clipping", AdaptiveQuantile),
        Specimen("count not paid for", "clipping", CountNotPaidFor, "the count's noise is free"),
        Specimen("soft clip", "clipping", SoftClip, "huge gradients pass"),
        Specimen("stream noise", "noise", plain(StreamNoise)),
        Specimen("same noise on every rank", "noise", plain(SameOnEveryRank), "ranks share a stream"),
        Specimen("same noise in every run", "noise", plain(SameInEveryRun), "runs share a stream"),
        Specimen("seed reused after resume", "noise", plain(SeedReusedAfterResume), "a resumed run starts its noise again"),
        Specimen("same noise at every step", "noise", plain(SameEveryStep), "steps share a stream"),
        Specimen("same noise for every layer", "noise", plain(SameForEveryLayer), "layers share a stream"),
        Specimen("uniform noise", "noise", plain(UniformNoise), "right variance, wrong distribution"),
        Specimen("poisson", "sampler", sampler(PoissonSampler)),
        Specimen("shuffled", "sampler", sampler(ShuffledBatches)),
        Specimen("fixed batches as poisson", "sampler", sampler(FixedBatchesAsPoisson), "shuffled batches claim amplification"),
        Specimen("no empty batch", "sampler", sampler(NoEmptyBatch), "empty batches are filled up"),
        Specimen("truncated batch", "sampler", sampler(TruncatedBatch), "large batches lose their last records"),
        Specimen("same batches every epoch", "sampler", sampler(SameBatchesEveryEpoch), "draws repeat"),
        Specimen("draws again after resume", "sampler", sampler(DrawsAgainAfterResume), "a resumed run repeats its batches"),
        Specimen("rate understated", "sampler", sampler(RateUnderstated), "twice the claimed rate"),
        Specimen("linear rule", "layer rule", lambda: _with_rule(nn.Linear, None)),
        Specimen("bias forgotten", "layer rule", lambda: _with_rule(NormWithoutBias, _forgets_bias), "the rule forgets the bias"),
        Specimen("mean over tokens", "layer rule", lambda: _with_rule(MeanOverTokens, _averages_tokens),
                 "tokens averaged, not summed"),
        Specimen("spectral convolution", "bounds", lambda: (lambda: SpectralConv2d(1, 2, 3, bias=True), (1, 5, 5))),
        Specimen("bias bound without area", "bounds", lambda: (lambda: BiasBoundWithoutArea(1, 2, 3, bias=True), (1, 5, 5)),
                 "bias bound without √(HW)"),
        Specimen("overlap forgotten", "bounds", lambda: (lambda: OverlapForgotten(1, 2, 3, bias=True), (1, 5, 5)),
                 "kernel bound without overlapping windows"),
        Specimen("spectral dense", "bounds", lambda: (lambda: SpectralDense(5, 4), (5,))),
        Specimen("power iteration", "bounds", lambda: (lambda: PowerIterationNorm(5, 4), (5,)), "a norm from below"),
    ]  # fmt: skip


__all__ = ["Specimen", "examine", "zoo"]
