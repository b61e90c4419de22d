"""Mechanisms: geometry × clipping × noise. One file per geometry; importing this package registers them all."""

import erlangen.mechanisms.gredp
import erlangen.mechanisms.rep
import erlangen.mechanisms.spectral  # noqa: F401  (registers)
from erlangen.mechanisms.base import (
    Context,
    Mechanism,
    make_mechanism,
    mechanisms,
    register_mechanism,
)
from erlangen.mechanisms.clipless import Clipless
from erlangen.mechanisms.clipping import ClippingRule, make_clipping
from erlangen.mechanisms.frequency import Fourier
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.geodp import Angles, Direction, PublishedGeoDP, Shrink
from erlangen.mechanisms.geometry import Diagonal, Geometry
from erlangen.mechanisms.noise import NoiseSource, SecureNoise, StreamNoise
from erlangen.mechanisms.published import Layerwise, PublishedGReDP

__all__ = [
    "Angles",
    "Clipless",
    "ClippingRule",
    "Context",
    "Diagonal",
    "Direction",
    "Fourier",
    "GaussianMechanism",
    "Geometry",
    "Layerwise",
    "Mechanism",
    "NoiseSource",
    "PublishedGReDP",
    "PublishedGeoDP",
    "SecureNoise",
    "Shrink",
    "StreamNoise",
    "make_clipping",
    "make_mechanism",
    "mechanisms",
    "register_mechanism",
]
