"""One declarative preset per table or figure (trained, or measured), and the runner."""

from erlangen.experiments.measurements import Measurement, Point
from erlangen.experiments.presets import Cell, Preset, preset, presets, register_preset

__all__ = ["Cell", "Measurement", "Point", "Preset", "preset", "presets", "register_preset"]
