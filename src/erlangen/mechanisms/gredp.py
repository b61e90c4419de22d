"""GReDP (Wang et al. 2025) in its sound form: clip, white noise once per batch in the frequency domain, back.

    release  F⁻¹(F Σ clip(g_i) + white Hermitian noise of scale σC) / B

The transform is unitary, so clipping is the same in either domain (Parseval) and white noise stays white: this *is*
DP-SGD in distribution, with multiplier σ. Selecting the real part reduces nothing that counts; what is real in the
paper is block-circulant layers (`erlangen.circulant`), which leave fewer coordinates to noise.
"""

from __future__ import annotations

from typing import Any

from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism
from erlangen.mechanisms.frequency import Fourier
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.published import PublishedGReDP

READINGS = ("complex", "real", "per-sample")


@register_mechanism("gredp")
def gredp(context: Context) -> Mechanism:
    """Options: axes (by parameter); as_published="complex" | "real" | "per-sample", split=(a, b) for "complex".

    The readings of the paper are priced at what they guarantee: "complex" σ·min(a, b) (σ/√2 for the paper's split,
    σ/√(2L) with per-layer clipping), "real" nothing (ε = ∞), "per-sample" √B times "complex".
    """
    options: dict[str, Any] = dict(context.options)
    known_options("gredp", options, ("axes", "as_published", "split"))
    geometry = Fourier(axes=options.get("axes"))
    reading = options.get("as_published")
    if not reading:
        if "split" in options:
            raise ValueError("split is a part of as_published='complex'; the sound form has white noise")
        return GaussianMechanism(context.noise_multiplier, context.clipping, geometry, context.noise, "gredp")
    if reading not in READINGS:
        raise ValueError(f"as_published is {reading!r}; GReDP has the readings {', '.join(READINGS)}")
    if reading != "complex" and "split" in options:
        raise ValueError(f"split is a part of as_published='complex', not of {reading!r}")
    extra: dict[str, Any] = {"split": tuple(options["split"])} if "split" in options else {}
    if reading == "real":
        extra["split"] = (1.0, 0.0)
    return PublishedGReDP(
        context.noise_multiplier, context.clipping, geometry, context.noise, per_sample=reading == "per-sample", **extra
    )
