"""Mechanisms: geometry × clipping × noise. One file per geometry; importing this package registers them all."""

from erlangen.mechanisms.base import (
    Context,
    Mechanism,
    make_mechanism,
    mechanisms,
    register_mechanism,
)
from erlangen.mechanisms.clipping import ClippingRule, make_clipping
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.geometry import Diagonal, Geometry
from erlangen.mechanisms.noise import NoiseSource, SecureNoise, StreamNoise

__all__ = [
    "ClippingRule",
    "Context",
    "Diagonal",
    "GaussianMechanism",
    "Geometry",
    "Mechanism",
    "NoiseSource",
    "SecureNoise",
    "StreamNoise",
    "make_clipping",
    "make_mechanism",
    "mechanisms",
    "register_mechanism",
]
