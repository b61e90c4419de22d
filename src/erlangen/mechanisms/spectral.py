"""Spectral-DP (Feng et al. 2023) in its sound form: filter, clip, noise on the kept frequencies, back.

    c_i = P H g_i,   clip ‖c_i‖ ≤ C,   release  H Pᵀ(Σ c_i + N(0, σ²C² I_K)) / B

P keeps K of N coordinates of every kernel (a fixed, data-independent, conjugate-symmetric set). Sensitivity C, noise
multiplier σ: the event is Gaussian(σ). What the filter buys is a noise energy of σ²C²·K; what it costs is the part of
the gradient outside P.
"""

from __future__ import annotations

from typing import Any

from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism
from erlangen.mechanisms.frequency import Fourier
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.published import Layerwise


@register_mechanism("spectral")
def spectral(context: Context) -> Mechanism:
    """Options: ratio (one, or by parameter), mask and axes (by parameter), order; as_published=True for the original.

    As published every layer is clipped at C before it is filtered and gets noise σ·C: true multiplier σ/√L.
    """
    options: dict[str, Any] = dict(context.options)
    known_options("spectral", options, ("ratio", "mask", "axes", "order", "as_published"))
    published = options.get("as_published", False)
    order = options.get("order", "clip-first" if published else "filter-first")
    geometry = Fourier(options.get("ratio", 0.5), options.get("mask"), options.get("axes"), order)
    if published:
        return Layerwise(context.noise_multiplier, context.clipping, geometry, context.noise)
    return GaussianMechanism(context.noise_multiplier, context.clipping, geometry, context.noise, "spectral")
