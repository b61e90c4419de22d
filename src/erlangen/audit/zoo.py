"""Deliberately broken mechanisms, rules, samplers, sources, companions and layers (`broken`), each beside its sound twin.

Every one is a mistake seen in public code, and a few lines away from something sound. `examine` does not know which is which: it
runs the audits of the specimen's kind and says what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from erlangen import lipschitz as lip
from erlangen.audit.broken import clipping as clips
from erlangen.audit.broken import companions as judges
from erlangen.audit.broken import layers as rules
from erlangen.audit.broken import mechanisms as bad
from erlangen.audit.broken import randomness as draws
from erlangen.audit.broken import sessions as trainers
from erlangen.audit.clipping import audit_clipping, audit_constants
from erlangen.audit.companions import audit_companion
from erlangen.audit.covariance import audit_covariance, states_its_covariance
from erlangen.audit.flow import audit_flow
from erlangen.audit.layers import audit_layer
from erlangen.audit.montecarlo import Subject, audit_releases
from erlangen.audit.randomness import audit_noise, audit_sampler
from erlangen.audit.restarts import audit_restarts
from erlangen.audit.sessions import audit_sessions
from erlangen.audit.static import audit_bounds
from erlangen.audit.steps import Step, audit_step
from erlangen.audit.verdict import Finding
from erlangen.gradients.registry import _RULES, registered
from erlangen.mechanisms import Diagonal, Direction, Fourier, GaussianMechanism, Mechanism, PublishedGReDP, StreamNoise
from erlangen.mechanisms.clipping import AdaptiveQuantile, AutoS, Flat, PerLayer
from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate
from erlangen.sampling import PoissonSampler, ShuffledBatches
from erlangen.streams import seed_layers
from erlangen.training.session import Session

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
        if static and states_its_covariance(build()):
            found.append(audit_covariance(Subject(name, build, SHAPES), 800))
        return [*found, audit_releases(Subject(name, build, SHAPES), trials, pilot=200, seed=seed)]
    if specimen.kind == "clipping":
        build = lambda: bound_to(GaussianMechanism(SIGMA, make(BOUND), noise=StreamNoise(1)))  # noqa: E731
        return [audit_clipping(name, make), audit_constants(name, make), audit_flow(name, build, SHAPES, BOUND)]
    if specimen.kind == "noise":
        return [audit_noise(name, make)]
    if specimen.kind == "sampler":
        return [audit_sampler(name, make)]
    if specimen.kind == "layer rule":
        registered()  # all families, or those that are loaded later would be forgotten with the specimen
        before = dict(_RULES)
        try:
            return [audit_layer(name, make())]
        finally:  # the zoo must not infect the registry
            _RULES.clear()
            _RULES.update(before)
    if specimen.kind == "session":
        return [audit_sessions(name, None, {"mechanism": "iso"}, make)]  # type: ignore[arg-type]
    if specimen.kind == "restart":
        return [audit_restarts(name, options, make) for options in ({"seed": 3}, {})]  # type: ignore[arg-type]
    if specimen.kind == "companion":
        return audit_companion(name, make)  # type: ignore[arg-type]
    return [audit_bounds(name, *make()), audit_step(name, lambda: trained(*make()))]


def bound_to(mechanism: Mechanism) -> Mechanism:
    mechanism.bind({n: torch.zeros(s) for n, s in SHAPES.items()}, BATCH)
    return mechanism


def trained(layer: Callable[[], Any], shape: tuple[int, ...]) -> Step:
    """A Lipschitz layer with wild weights (projection tames them) in a small network that trains without clipping."""
    seed_layers(0)
    inner = layer()
    for p in inner.parameters():
        nn.init.normal_(p, std=10.0)
    before = [lip.SpectralDense(shape[0], shape[0])] if len(shape) == 1 else []
    network = lip.Sequential(lip.BoundedInput(shape, 1.0), *before, inner, lip.Flatten())
    return Step(network, shape, "clipless", {"loss": 1.0, "split": "local"})


def _iso(kind: type[GaussianMechanism] = GaussianMechanism, **options: Any) -> Callable[[], Mechanism]:
    return lambda: kind(SIGMA, BOUND, noise=StreamNoise(1), **options)


def zoo() -> list[Specimen]:
    """Every specimen, sound and broken, in no telling order."""
    plain = lambda kind: lambda seed, run, rank: kind(seed, run, rank)  # noqa: E731
    sampler = lambda kind: lambda n, b, seed, run: kind(n, b, seed, run)  # noqa: E731
    adaptive = lambda kind: lambda: kind(SIGMA, AdaptiveQuantile(BOUND), noise=StreamNoise(1))  # noqa: E731
    return [
        Specimen("iso", "mechanism", _iso()),
        Specimen("one layer forgotten", "mechanism", _iso(bad.OneLayerForgotten), "no noise on one layer"),
        Specimen("spectral", "mechanism", lambda: GaussianMechanism(SIGMA, BOUND, Fourier(0.5), StreamNoise(1))),
        Specimen("last bin forgotten", "mechanism", lambda: bad.LastBinForgotten(SIGMA, BOUND, Fourier(), StreamNoise(1)),
                 "no noise on the last frequency"),
        Specimen("noise by realised batch", "mechanism", _iso(bad.NoiseByRealisedBatch), "noise scaled by the realised batch"),
        Specimen("divided by realised batch", "mechanism", _iso(bad.DividedByRealisedBatch), "mean over the realised batch"),
        Specimen("clip after mean", "mechanism", _iso(bad.ClipAfterMean), "the mean is clipped, not each record"),
        Specimen("no clip", "mechanism", _iso(bad.UnclippedBatch), "nothing is clipped"),
        Specimen("not a number passes", "mechanism", _iso(bad.NanPasses), "one bad record shows in the release"),
        Specimen("variance for std", "mechanism", _iso(bad.StdIsVariance), "σ²C² used as a standard deviation"),
        Specimen("rep", "mechanism", lambda: GaussianMechanism(
            SIGMA, BOUND, Diagonal({n: torch.linspace(0.5, 2, s.numel()).view(s) for n, s in SHAPES.items()}), StreamNoise(1))),
        Specimen("metric from the batch", "mechanism", _iso(bad.DataDependentMetric), "the metric depends on the records"),
        Specimen("noise repeats", "mechanism", _iso(bad.ForgetsNextRelease), "every release has the same noise"),
        Specimen("shards", "mechanism", _iso(bad.Shards)),
        Specimen("shards share noise", "mechanism", _iso(bad.ShardsShareNoise), "ranks noise their shards from one stream"),
        Specimen("gredp complex, priced truly", "mechanism", lambda: PublishedGReDP(SIGMA, BOUND, Fourier(), StreamNoise(1))),
        Specimen("gredp complex, as claimed", "mechanism", lambda: bad.HalfComplexNoise(SIGMA, BOUND, Fourier(), StreamNoise(1)),
                 "half the noise, priced as all of it"),
        Specimen("half spectrum unweighted", "mechanism", lambda: GaussianMechanism(
            SIGMA, BOUND, bad.HalfSpectrumUnweighted(), StreamNoise(1)), "norms from an unweighted half spectrum"),
        Specimen("adaptive", "mechanism", adaptive(GaussianMechanism)),
        Specimen("count released as it is", "mechanism", adaptive(bad.CountReleasedAsItIs), "the quantile has no noise"),
        Specimen("geodp direction", "mechanism", lambda: Direction(SIGMA, BOUND, StreamNoise(1))),
        Specimen("geodp, magnitude unclipped", "mechanism", lambda: bad.UnclippedMagnitude(SIGMA, BOUND, StreamNoise(1)),
                 "the magnitude is not clipped"),
        Specimen("geodp, or for and", "mechanism", lambda: bad.OrInsteadOfComposition(SIGMA, BOUND, StreamNoise(1)),
                 "two releases priced as one"),
        Specimen("optimistic event", "mechanism", _iso(bad.SubsampledNoise), "the event claims more noise than there is"),
        Specimen("noise of the mean", "mechanism", _iso(bad.NoiseOfTheMean), "noise σC/B on a sum that is not divided"),
        Specimen("bound moves first", "mechanism", adaptive(bad.QuantileBeforeNoise), "clipped at one bound, noised for another"),
        Specimen("bound sinks", "mechanism", _iso(bad.NoiseOfTheFirstPart), "the bound is lowered between sum and noise"),
        Specimen("empty batches skipped", "mechanism", _iso(bad.SkipsEmptyBatches), "no noise where there is nothing"),
        Specimen("divided by the length", "mechanism", _iso(bad.ClippedAgain), "scaled by the length before noise"),
        Specimen("flat", "clipping", Flat),
        Specimen("factor in 16 bits", "clipping", clips.FactorInHalfPrecision, "the clip factor is rounded up"),
        Specimen("squared norm", "clipping", clips.SquaredNormAgainstBound, "C against ‖g‖²"),
        Specimen("largest layer", "clipping", clips.LargestLayerNorm, "the norm of the largest layer for all"),
        Specimen("any γ", "clipping", clips.AnyGamma, "a γ so small that norms below it are measured as zero"),
        Specimen("auto-s without γ", "clipping", clips.NoGamma, "a gradient of zero becomes NaN"),
        Specimen("per-layer", "clipping", PerLayer),
        Specimen("per-layer counted once", "clipping", clips.PerLayerCountedOnce, "every layer clipped at C, accounted as one"),
        Specimen("auto-s", "clipping", AutoS),
        Specimen("auto-s, γ outside", "clipping", clips.AutoSWithoutClip, "C/‖g‖ + γ"),
        Specimen("adaptive quantile", "clipping", AdaptiveQuantile),
        Specimen("count not paid for", "clipping", clips.CountNotPaidFor, "the count's noise is free"),
        Specimen("soft clip", "clipping", clips.SoftClip, "huge gradients pass"),
        Specimen("stream noise", "noise", plain(StreamNoise)),
        Specimen("same noise on every rank", "noise", plain(draws.SameOnEveryRank), "ranks share a stream"),
        Specimen("same noise in every run", "noise", plain(draws.SameInEveryRun), "runs share a stream"),
        Specimen("seed reused after resume", "noise", plain(draws.SeedReusedAfterResume), "a resumed run starts its noise again"),
        Specimen("same noise at every step", "noise", plain(draws.SameEveryStep), "steps share a stream"),
        Specimen("same noise for every layer", "noise", plain(draws.SameForEveryLayer), "layers share a stream"),
        Specimen("uniform noise", "noise", plain(draws.UniformNoise), "right variance, wrong distribution"),
        Specimen("seeded by the step", "noise", plain(draws.SeededByStep), "every run draws the same noise at step k"),
        Specimen("tails cut", "noise", plain(draws.CutTails), "noise ends at two standard deviations"),
        Specimen("noise in 16 bits", "noise", plain(draws.NoiseInHalfPrecision), "value and noise are rounded to eight bits"),
        Specimen("poisson", "sampler", sampler(PoissonSampler)),
        Specimen("rate of the loader", "sampler", sampler(draws.RateOfTheLoader), "q = 1/⌈N/B⌉, not B/N"),
        Specimen("with replacement", "sampler", sampler(draws.WithReplacement), "a record may be in a batch twice"),
        Specimen("no record twice running", "sampler", sampler(draws.SkipsRecordsOfTheLastBatch), "who was just drawn sits out"),
        Specimen("shuffled", "sampler", sampler(ShuffledBatches)),
        Specimen("fixed batches as poisson", "sampler", sampler(draws.FixedBatchesAsPoisson), "shuffled, but amplified"),
        Specimen("no empty batch", "sampler", sampler(draws.NoEmptyBatch), "empty batches are filled up"),
        Specimen("truncated batch", "sampler", sampler(draws.TruncatedBatch), "large batches lose their last records"),
        Specimen("same batches every epoch", "sampler", sampler(draws.SameBatchesEveryEpoch), "draws repeat"),
        Specimen("draws again after resume", "sampler", sampler(draws.DrawsAgainAfterResume), "a resumed run repeats its batches"),
        Specimen("rate understated", "sampler", sampler(draws.RateUnderstated), "twice the claimed rate"),
        Specimen("selective update", "companion", SelectiveUpdate),
        Specimen("rejections are free", "companion", judges.RejectionsAreFree, "only accepted updates are paid for"),
        Specimen("change not clipped", "companion", judges.ChangeNotClipped, "one loss decides alone"),
        Specimen("mean over realised judges", "companion", judges.MeanOverRealisedJudges, "divided by the realised sample"),
        Specimen("judges are the batch", "companion", judges.JudgesAreTheBatch, "the second sample is the first one"),
        Specimen("importance sampling", "companion", ImportanceSampling),
        Specimen("rates share a sum", "companion", judges.RatesShareASum, "one record moves every other's rate"),
        Specimen("rate above the price", "companion", judges.RateAboveThePrice, "drawn more often than is paid for"),
        Specimen("importance draws repeat", "companion", judges.DrawsRepeat, "the same draws after seven steps"),
        Specimen("linear rule", "layer rule", lambda: rules.with_rule(nn.Linear, None)),
        Specimen("bias forgotten", "layer rule", lambda: rules.with_rule(rules.NormWithoutBias, rules.forgets_bias),
                 "the rule forgets the bias"),
        Specimen("mean over tokens", "layer rule", lambda: rules.with_rule(rules.MeanOverTokens, rules.averages_tokens),
                 "tokens averaged, not summed"),
        Specimen("no cross terms", "layer rule", lambda: rules.with_rule(nn.Linear, rules.adds_up_norms),
                 "norms as if tokens were orthogonal"),
        Specimen("session", "session", Session),
        Specimen("mean in 16 bits", "session", trainers.MeanInHalfPrecision, "16-bit gradients divided by the realised batch"),
        Specimen("views clipped apart", "session", trainers.ViewsClippedApart, "views clipped separately, counted as one"),
        Specimen("unit ignored", "session", trainers.UnitIgnored, "a patient's images clipped one by one"),
        Specimen("padding counts", "session", trainers.PaddingCounts, "rows that stand in for nobody contribute"),
        Specimen("accumulated, then clipped", "session", trainers.MicroBatchClippedAsOne, "a micro-batch is clipped as one record"),
        Specimen("batch statistics", "session", trainers.BatchStatistics, "inputs centred by the batch"),
        Specimen("class counts", "session", trainers.WeightsByClassCounts, "losses weighted by the batch's class counts"),
        Specimen("rate by realised batch", "session", trainers.RateByRealisedBatch, "learning rate from the realised batch"),
        Specimen("loss in the checkpoint", "session", trainers.LossInTheCheckpoint, "a training loss is kept without noise"),
        Specimen("average of inputs", "session", trainers.AverageOfInputs, "statistics of records are kept without noise"),
        Specimen("restarts", "restart", Session),
        Specimen("batches again, noise on", "restart", trainers.SamplerStartsAgain, "a resumed run pairs noise with other batches"),
        Specimen("entropy written down", "restart", trainers.EntropyInTheCheckpoint, "unseeded noise comes again after resume"),
        Specimen("one stream for all runs", "restart", trainers.OneStreamForAll, "runs that differ share their noise"),
        Specimen("spectral convolution", "bounds", lambda: (lambda: lip.SpectralConv2d(1, 2, 3, bias=True), (1, 5, 5))),
        Specimen("bias bound without area", "bounds", lambda: (lambda: rules.BiasBoundWithoutArea(1, 2, 3, bias=True), (1, 5, 5)),
                 "bias bound without √(HW)"),
        Specimen("overlap forgotten", "bounds", lambda: (lambda: rules.OverlapForgotten(1, 2, 3, bias=True), (1, 5, 5)),
                 "kernel bound without overlapping windows"),
        Specimen("spectral dense", "bounds", lambda: (lambda: lip.SpectralDense(5, 4), (5,))),
        Specimen("power iteration", "bounds", lambda: (lambda: rules.PowerIterationNorm(5, 4), (5,)), "a norm from below"),
    ]  # fmt: skip


__all__ = ["Specimen", "examine", "zoo"]
