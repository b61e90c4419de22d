"""How large the tiles of a kernel are: built-in choices, and what was measured on this device, kept in the user's cache.

``python benchmarks/kernels.py --keep`` measures and writes the file; it is read once per process. Tiles decide how fast a
kernel is and in which order it adds, never what is guaranteed: an entry that makes no sense is left out.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from erlangen.atomic import write_atomically
from erlangen.gradients.kernels import HAS_TRITON
from erlangen.places import user_cache


@dataclass(frozen=True)
class Norms:
    """Norms from Gram matrices: channels of one product, and how a program runs."""

    depth: int
    warps: int
    stages: int

    def sensible(self) -> bool:
        return self.depth in (32, 64, 128) and self.warps in (1, 2, 4, 8) and 1 <= self.stages <= 6


@dataclass(frozen=True)
class Sum:
    """Weighted sum: tile of outputs × channels, how a program runs, and about how many there are.

    ``stored``: for these shapes it was faster to store the gradients than to form them again.
    """

    outputs: int
    channels: int
    warps: int
    stages: int
    programs: int = 792
    stored: bool = False

    def sensible(self) -> bool:
        sizes = (16, 32, 64, 128, 256)
        return (
            self.outputs in sizes and self.channels in sizes and self.warps in (1, 2, 4, 8, 16) and 1 <= self.stages <= 8
            and 1 <= self.programs <= 1 << 16
        )  # fmt: skip


@dataclass(frozen=True)
class Gradient:
    """Stored gradients: whether a program forms the three taps of a kernel row, its tile, pixels at a time, how it runs.

    ``flat``: its ``channels`` are as many columns of [taps × channels], whichever taps they belong to.
    """

    row: bool
    outputs: int
    channels: int
    block: int
    warps: int
    stages: int
    flat: bool = False

    def sensible(self) -> bool:
        sizes = (32, 64, 128)
        return (
            self.outputs in sizes and self.channels in (*sizes, 256) and self.block in sizes and self.warps in (4, 8)
            and 1 <= self.stages <= 8 and not (self.flat and self.row)
        )  # fmt: skip


#: by the positions of an owner, rounded up to a power of two; 16 and 64 measured best on an H200
NORMS = {16: Norms(128, 1, 3), 32: Norms(128, 2, 3), 64: Norms(128, 4, 3), 128: Norms(64, 8, 3)}
SUMS = {16: Sum(128, 64, 4, 7), 32: Sum(128, 64, 4, 5), 64: Sum(64, 128, 4, 5), 128: Sum(128, 128, 8, 5)}


def norms(block: int) -> Norms:
    """The tile for ``block`` positions."""
    return _entry("norms", str(block), Norms) or NORMS[block]


def weighing(block: int, outputs: int, channels: int) -> Sum:
    """The tile for ``block`` positions and a kernel of outputs × channels."""
    return _entry("sums", f"{block}x{outputs}x{channels}", Sum) or SUMS[block]


def gradient(tokens: int, outputs: int, channels: int) -> Gradient | None:
    """The tile that was measured for these shapes, if any."""
    return _entry("gradients", f"{tokens}x{outputs}x{channels}", Gradient)


def path() -> Path:
    return user_cache() / "kernels.json"


def keep(machine: str, kind: str, key: str, setting: Norms | Sum | Gradient) -> None:
    """Write one measured choice for a machine, by its name."""
    known = _file()
    known.setdefault(machine, {}).setdefault(kind, {})[key] = asdict(setting)
    path().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path(), (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())
    _table.cache_clear()


def _entry(kind: str, key: str, of: type) -> Any:
    try:
        found = _table(machine()).get(kind, {}).get(key)
        if found is None or not all(isinstance(value, int) for value in found.values()):
            return None
        setting = of(**found)
        return setting if setting.sensible() else None
    except (AttributeError, TypeError):
        return None


@functools.cache
def machine() -> str:
    """What a measurement holds for: this device, and the compiler of its kernels."""
    if not (HAS_TRITON and torch.cuda.is_available()):
        return "cpu"
    import triton  # takes a while

    return f"{torch.cuda.get_device_name()}, Triton {triton.__version__}"


@functools.cache
def _table(machine: str) -> dict[str, Any]:
    found = _file().get(machine, {})
    return found if isinstance(found, dict) else {}


def _file() -> dict[str, Any]:
    try:
        read = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
