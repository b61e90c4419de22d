"""Clipping rules: per-sample weights and the sensitivity they guarantee."""

from erlangen.mechanisms.clipping.adaptive import AdaptiveQuantile
from erlangen.mechanisms.clipping.base import ClippingRule, SideQuery, clipping_rules, make_clipping, register_clipping
from erlangen.mechanisms.clipping.fixed import PSAC, AutoS, Flat, PerLayer

__all__ = [
    "PSAC",
    "AdaptiveQuantile",
    "AutoS",
    "ClippingRule",
    "Flat",
    "PerLayer",
    "SideQuery",
    "clipping_rules",
    "make_clipping",
    "register_clipping",
]
