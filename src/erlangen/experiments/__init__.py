"""One declarative preset per table or figure, and the runner."""

from erlangen.experiments.presets import Cell, Preset, preset, presets, register_preset

__all__ = ["Cell", "Preset", "preset", "presets", "register_preset"]
