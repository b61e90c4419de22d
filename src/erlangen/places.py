"""Where the library keeps files of its own, by the custom of the platform."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """The user's cache: what may be deleted and made again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "erlangen"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "erlangen"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "erlangen"
