"""Erlangen: geometry-aware differentially private deep learning for PyTorch.

Every name below is imported on first use, so that ``import erlangen`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "PrivacyEngine": "erlangen.engine",
    "RowMap": "erlangen.gradients.rows",
    "fix": "erlangen.gradients.problems",
}

__all__ = ["PrivacyEngine", "RowMap", "__version__", "fix"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'erlangen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
