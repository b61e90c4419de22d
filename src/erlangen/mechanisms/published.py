"""Mechanisms as two papers wrote them down, priced at what they really guarantee.

Both clip every layer l to its own bound c and add noise of scale σ·c to each layer, and both call that multiplier σ.
One record moves all L layers at once: the joint query, in units of its noise, has sensitivity (Σ_l c_l²/s_l²)^½, so the
release is a Gaussian of multiplier (Σ_l c_l²/s_l²)^(−½) = σ/√L for s_l = σ·c_l. Clipped flat, L counts as 1. A layer is
a module: its weight and its bias are clipped together, unless ``groups="tensors"`` asks for more groups, and more ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from erlangen.accounting import gaussian, non_private
from erlangen.mechanisms.clipping import AdaptiveQuantile, ClippingRule, PerLayer
from erlangen.mechanisms.frequency import Fourier, parity
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.noise import NoiseSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent

#: by the part of the spectrum that has noise
BARE = {
    "real": "GReDP with real noise on the spectrum (its Eq. 11) adds an even sequence to every kernel or circulant row: the "
    "odd part of the gradient is released without any noise",
    "imaginary": "GReDP with imaginary noise on the spectrum adds an odd sequence to every kernel or circulant row: the even "
    "part of the gradient, and with it every bias, is released without any noise",
}


class Layerwise(GaussianMechanism):
    """Noise σ·C_l on layer l, whatever the number of layers. Per-layer clipping reads one C as every layer's own, and
    clips the weight and the bias of a layer together unless its ``groups`` say otherwise."""

    #: true multiplier over claimed multiplier, for one layer
    factor = 1.0

    def __init__(
        self, noise_multiplier: float, clipping: ClippingRule | float, geometry: Fourier,
        noise: NoiseSource | None = None, name: str = "spectral",
    ) -> None:  # fmt: skip
        super().__init__(noise_multiplier, clipping, geometry, noise, name)
        if isinstance(self.clipping, AdaptiveQuantile):
            raise ValueError(f"{name} as published has a fixed bound; use clipping 'flat' or 'per-layer'")
        self.expected_batch = 1.0
        if isinstance(self.clipping, PerLayer) and self.clipping.grouping is None:
            self.clipping = PerLayer(self.clipping.bounds or self.clipping.bound, groups="layers")
        self._layers = 1
        #: which group of the clipping rule each parameter belongs to
        self._layer: dict[str, int] = {}

    def bind(self, parameters: Mapping[str, Tensor], expected_batch: float = 1.0) -> None:
        groups = self.clipping.groups(list(parameters))
        if isinstance(self.clipping, PerLayer) and self.clipping.bounds is None:
            self.clipping = PerLayer([self.clipping.bound] * len(groups), self.clipping.grouping)
        super().bind(parameters, expected_batch)
        self._layers = len(groups)
        self._layer = {name: k for k, group in enumerate(groups) for name in group}

    def _bounds(self) -> list[float]:
        """C_l at the C of this moment."""
        return self.clipping.each(self._layers) if isinstance(self.clipping, PerLayer) else [self.clipping.bound]

    def layer_std(self, name: str) -> float:
        """σ·C_l"""
        return self.noise_multiplier * self._bounds()[self._layer[name]]

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        if isinstance(self.clipping, PerLayer) and not self.shapes:
            raise RuntimeError(f"{self.name} clips per layer and does not know how many there are: call bind() first")
        sigma = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        return gaussian(sigma * self.factor / math.sqrt(self._layers))

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        self._require_one_bound()
        self.noise.next_release()
        released = {name: self.noisy(name, total) / expected_batch for name, total in self._sum.items()}
        self._reset()
        return released

    def noisy(self, name: str, total: Tensor) -> Tensor:
        """The released sum of one parameter."""
        return self.geometry.inverse(name, self.noise.perturb(self.geometry.forward(name, total), self.layer_std(name)))

    def describe(self) -> dict[str, Any]:
        ratio = self.factor / math.sqrt(self._layers)
        true = self.unsound or ("sound" if ratio == 1 else f"sound at its true multiplier {ratio:.6g}·σ, not σ")
        facts = {"noise_std": None, "covariance": self.covariance_words(), "as_published": True, "layers": self._layers}
        return {**super().describe(), **facts, "guarantee": true}

    def covariance_words(self) -> str:
        """Of each layer's noise, for people: σ²C_l², whatever the joint sensitivity of the layers is."""
        return ", ".join(self.geometry.covariance_words(std) for std in self._layer_stds()) + " on each layer"

    def _layer_stds(self) -> list[float]:
        """The different noise scales of the layers; that of one bound before the layers are known."""
        return sorted({self.noise_multiplier * bound for bound in (self._bounds() if self._layer else [self.clipping.bound])})


class PublishedGReDP(Layerwise):
    """Re F⁻¹(F V + τ) with τ = a·σc·N(0, 1) + i·b·σc·N(0, 1), independent in every bin (GReDP, Theorems 1 and 2).

    The real part has covariance ½σ²c²[(a² + b²)·I + (a² − b²)·Π], Π the parity j → −j: variance a²σ²c² on even
    directions and b²σ²c² on odd ones. The true multiplier is σ·min(a, b), whatever a² + b² is. Theorem 1 takes
    a = b = 1/√2 and claims σ; Eq. 11 has b = 0. ``per_sample`` (Algorithm 2, line 7) draws the noise for each of the B
    samples of a nominal batch, √B more of it; B is the expected size, because noise for the drawn samples only would
    leave an empty batch without any.
    """

    def __init__(
        self, noise_multiplier: float, clipping: ClippingRule | float, geometry: Fourier,
        noise: NoiseSource | None = None, split: tuple[float, float] = (math.sqrt(0.5), math.sqrt(0.5)),
        per_sample: bool = False,
    ) -> None:  # fmt: skip
        a, b = split
        if not (a >= 0 and b >= 0 and math.isclose(a * a + b * b, 1.0, rel_tol=1e-9)):
            raise ValueError(f"split is {split}; the paper's Theorem 2 needs a, b ≥ 0 with a² + b² = 1")
        super().__init__(noise_multiplier, clipping, geometry, noise, "gredp")
        self.split, self.per_sample = (float(a), float(b)), per_sample

    @property
    def unsound(self) -> str | None:  # type: ignore[override]
        a, b = self.split
        return None if min(a, b) > 0 else BARE["imaginary" if a == 0 else "real"]

    @property
    def repeats(self) -> float:
        """How many independent noise vectors are in the sum."""
        return self.expected_batch if self.per_sample else 1.0

    @property
    def factor(self) -> float:  # type: ignore[override]
        return min(self.split) * math.sqrt(self.repeats)

    def event(self, noise_multiplier: float | None = None) -> DpEvent:
        return non_private(self.unsound) if self.unsound else super().event(noise_multiplier)

    def noisy(self, name: str, total: Tensor) -> Tensor:
        dims = self._dims(name)
        spectrum = torch.fft.fftn(total, dim=dims, norm="ortho") if dims else total + 0j
        scale = self.layer_std(name) * math.sqrt(self.repeats)
        real = self.noise.perturb(spectrum.real.contiguous(), self.split[0] * scale)
        imag = self.noise.perturb(spectrum.imag.contiguous(), self.split[1] * scale)
        noisy = torch.complex(real, imag)
        return (torch.fft.ifftn(noisy, dim=dims, norm="ortho") if dims else noisy).real

    def covariance(self, name: str) -> Tensor:
        d = self.shapes[name].numel()
        units = torch.eye(d, dtype=torch.float64)
        flipped = parity(units.view(d, *self.shapes[name]), self._dims(name)).reshape(d, d)
        a2, b2 = (s * s for s in self.split)
        scale = self.layer_std(name) ** 2 * self.repeats / 2
        return scale * ((a2 + b2) * units + (a2 - b2) * flipped)

    def describe(self) -> dict[str, Any]:
        a, b = (f"{s:.6g}" for s in self.split)
        drawn = "for each sample of the expected batch" if self.per_sample else "once per batch"
        return {**super().describe(), "spectrum_noise": f"{a}·σC on real and {b}·σC on imaginary parts, {drawn}"}

    def covariance_words(self) -> str:
        a2, b2 = (s * s * self.repeats for s in self.split)
        each = (f"{a2 * std**2:.4g} on even and {b2 * std**2:.4g} on odd sequences" for std in self._layer_stds())
        return ", ".join(each) + " of each layer"

    def noise_std(self, name: str) -> Tensor | float:
        """The marginal standard deviation; it says nothing about odd directions."""
        a2, b2 = (s * s for s in self.split)
        like = self._like[name]
        own = torch.arange(like.numel(), dtype=torch.float64).view(like.shape)
        fixed = (parity(own, self._dims(name)) == own).to(like)
        return self.layer_std(name) * ((a2 + b2 + (a2 - b2) * fixed) * self.repeats / 2).sqrt()

    def _dims(self, name: str) -> tuple[int, ...]:
        geometry = self.geometry
        assert isinstance(geometry, Fourier)
        return geometry.dims[name]
