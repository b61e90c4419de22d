"""Attacks on mechanisms as their papers wrote them down, run through the library's own code.

    python -m tests.mechanisms.attacks          prints the figures of docs/methods (some minutes)

A lower bound is ε_L = ln((TPR_L − δ)/FPR_U): 99.9 % Clopper–Pearson limits on trials that did not choose the threshold.
"""

from __future__ import annotations

import math

import torch
from scipy.stats import beta
from torch import Tensor

from erlangen import accounting
from erlangen.mechanisms import (
    Direction,
    Fourier,
    GaussianMechanism,
    Layerwise,
    PublishedGeoDP,
    PublishedGReDP,
    StreamNoise,
)
from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate

DELTA = 1e-5
CONFIDENCE = 0.999


def clopper_pearson(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two one-sided limits of a proportion, each at ``confidence``."""
    low = beta.ppf(1 - confidence, hits, trials - hits + 1) if hits else 0.0
    high = beta.ppf(confidence, hits + 1, trials - hits) if hits < trials else 1.0
    return float(low), float(high)


def lower_bound(with_record: Tensor, without: Tensor, delta: float = DELTA) -> float:
    """ε_L of the test "statistic > threshold", the threshold chosen on the first half and priced on the second."""
    half = with_record.numel() // 2
    ordered = without[:half].sort().values
    quantiles = ordered[((1 - torch.logspace(-5, -0.3, 60, dtype=torch.float64)) * half).long().clamp(max=half - 1)]
    between = (ordered[-1:] + with_record[:half].min()) / 2  # where nothing overlaps, far from either
    candidates = torch.cat([between, quantiles])

    def price(t: float, part: slice, confidence: float) -> float:
        hits, alarms = int((with_record[part] > t).sum()), int((without[part] > t).sum())
        trials = with_record[part].numel()
        low, _ = clopper_pearson(hits, trials, confidence)
        _, high = clopper_pearson(alarms, trials, confidence)
        return math.log((low - delta) / high) if low > delta else -math.inf

    best = max((float(t) for t in candidates), key=lambda t: price(t, slice(0, half), CONFIDENCE))
    return price(best, slice(half, None), CONFIDENCE)


def odd(size: int = 5) -> Tensor:
    """A unit kernel that is odd: the part that real noise would leave alone."""
    canary = torch.zeros(size)
    canary[1], canary[-1] = math.sqrt(0.5), -math.sqrt(0.5)
    return canary


def kernel_statistics(
    mechanism: Layerwise, trials: int, canary: Tensor | None = None, chunk: int = 500_000
) -> tuple[Tensor, Tensor]:
    """Released kernels projected on a clipped canary, with and without it. One row is one independent release."""
    canary = odd() if canary is None else canary
    size = canary.numel()
    mechanism.bind({"kernel": torch.zeros(1, 1, size)})
    out: list[list[Tensor]] = [[], []]
    for start in range(0, trials, chunk):
        rows = min(chunk, trials - start)
        for k, total in enumerate((canary.expand(rows, 1, size), torch.zeros(rows, 1, size))):
            mechanism.noise.next_release()
            out[k].append(mechanism.noisy("kernel", total.contiguous())[:, 0] @ canary)
    return torch.cat(out[0]), torch.cat(out[1])


def attack_gredp(sigma: float, trials: int, sound: bool = False, layers: int = 1) -> float:
    """One release of ``layers`` layers, each clipped at 1 and noised at scale σ; the canary fills all of them."""
    noise = StreamNoise(1)
    kind = Layerwise(sigma, 1.0, Fourier(), noise) if sound else PublishedGReDP(sigma, 1.0, Fourier(), noise)
    scores = kernel_statistics(kind, trials * layers)
    return lower_bound(*[s.view(trials, layers).sum(1) for s in scores])


def attack_spectral(sigma: float, trials: int, layers: int) -> float:
    """``layers`` layers filtered, clipped at 1 and noised at scale σ each; a constant kernel passes every low-pass."""
    mechanism = Layerwise(sigma, 1.0, Fourier(0.5, order="clip-first"), StreamNoise(1))
    scores = kernel_statistics(mechanism, trials * layers, torch.full((5,), math.sqrt(1 / 5)))
    return lower_bound(*[s.view(trials, layers).sum(1) for s in scores])


def attack_geodp(sigma: float, beta_: float, d: int, batch: int, trials: int, sound: bool = False) -> float:
    """Everybody else's clipped gradients sum to ½C·e_{d−1}; the canary adds C·e_d and turns the last angle by 63°."""
    bound = 0.1
    others = torch.zeros(1, d)
    others[0, -2] = bound / 2
    canary = torch.zeros(1, d)
    canary[0, -1] = bound
    noise = StreamNoise(1)
    mechanism = Direction(sigma, bound, noise) if sound else PublishedGeoDP(sigma, bound, beta_, noise)
    mechanism.bind({"w": others[0]}, batch)

    def statistic(rows: Tensor) -> float:
        y = mechanism.release({"w": rows}, batch)["w"]
        return float(torch.atan2(y[-1].abs(), y[-2].abs()))

    both = torch.cat([others, canary])
    scores = [torch.tensor([statistic(rows) for _ in range(trials)]) for rows in (both, others)]
    return lower_bound(*scores)


def attack_importance(sigma: float, rate: float, records: int, trials: int, sound: bool = False) -> float:
    """Everybody's gradient is C·e_1 but the canary's, which is long and orthogonal. Normalised by the sum of norms, its
    length takes their probability from all others: the batch shrinks, whether the canary is drawn or not."""
    rule = ImportanceSampling(rate, 1.0, as_published=not sound, seed=1)
    mechanism = GaussianMechanism(sigma, 1.0, noise=StreamNoise(1))
    gradients = torch.tensor([1.0, 0.0]).repeat(records, 1)
    canary = torch.tensor([[0.0, 1e6]])
    mechanism.bind({"w": gradients[0]}, rate * records)

    def statistic(rows: Tensor) -> float:
        drawn, weights = rule.draw(rows.norm(dim=1))
        return -float(mechanism.release({"w": rows[drawn] * weights[:, None]})["w"][0])

    both = torch.cat([gradients, canary])
    return lower_bound(*[torch.tensor([statistic(rows) for _ in range(trials)]) for rows in (both, gradients)])


def attack_selective(sigma: float, trials: int) -> float:
    """Decisions alone, on a batch whose changes of loss sum to −3σ bounds; the canary's is clipped at one bound. What is
    read is whether an update was rejected, which costs nothing if only accepted updates are paid for."""
    judge = SelectiveUpdate(1, 1.0, sigma, lambda _: None, bound=1.0, seed=1)
    before = torch.zeros(31)
    others = torch.cat([torch.full((30,), -sigma / 10), torch.zeros(1)])
    scores = []
    for canary in (50.0, 0.0):
        after = others.clone()
        after[-1] = canary
        scores.append(torch.tensor([float(not judge.decide(before, after)) for _ in range(trials)]))
    return lower_bound(*scores)


def exact(multiplier: float) -> float:
    return accounting.epsilon(accounting.gaussian(multiplier), DELTA)


def sampled(multiplier: float, rate: float) -> float:
    """ε of one Poisson-sampled release."""
    return accounting.epsilon(accounting.poisson(rate, accounting.gaussian(multiplier)), DELTA)


def main() -> None:
    for sigma in (3.731, 1.0811):
        found = attack_gredp(sigma, 20_000_000)
        print(
            f"GReDP complex, σ = {sigma}: claimed ε = {exact(sigma):.3f}, lower bound {found:.3f}, "
            f"exact {exact(sigma / math.sqrt(2)):.3f}"
        )
    found = attack_gredp(3.731, 200_000, layers=20)
    print(
        f"GReDP complex, 20 layers clipped each, σ = 3.731: claimed ε = {exact(3.731):.3f}, lower bound {found:.3f}, "
        f"exact {exact(3.731 / math.sqrt(40)):.3f}"
    )
    for layers in (1, 20):
        found = attack_spectral(3.731, 200_000, layers)
        print(
            f"Spectral-DP as published, {layers} layer(s) clipped each, σ = 3.731: claimed ε = {exact(3.731):.3f}, "
            f"lower bound {found:.3f}, exact {exact(3.731 / math.sqrt(layers)):.3f}"
        )
    found = attack_geodp(8.0, 0.1, 500, 4096, 12_000)
    print(f"GeoDP as published, σ = 8, β = 0.1, d = 500: claimed ε = {exact(8.0):.3f}, lower bound {found:.2f}")
    found = attack_geodp(8.0, 0.1, 500, 4096, 12_000, sound=True)
    print(f"GeoDP direction form, same attack: exact ε = {exact(8.0):.3f}, lower bound {found:.2f}")
    for sound in (False, True):
        found = attack_importance(8.0, 0.1, 1000, 12_000, sound)
        form = "bounded, same attack" if sound else "as published"
        print(f"IS {form}, σ = 8, q = 0.1, N = 1000: accounted ε = {sampled(8.0, 0.1):.3f}, lower bound {found:.2f}")
    found = attack_selective(1.0, 100_000)
    print(f"SUR, rejections at σ = 1: not paid for 0, lower bound {found:.2f}, exact {exact(1.0):.2f}")


if __name__ == "__main__":
    main()
