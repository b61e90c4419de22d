"""What made a figure: the commit and the versions of everything that its speed depends on."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def provenance(device: str = "cpu") -> dict[str, str | None]:
    """Commit and torch; on a GPU also Triton, CUDA, cuDNN and the driver. None: not there, or not to be found out.

    A changed tree is marked with "+". Where there is no repository (a copy on another machine), ``ERLANGEN_COMMIT`` names
    the commit.
    """
    import torch

    found: dict[str, str | None] = {"commit": commit(), "torch": torch.__version__}
    if not device.startswith("cuda"):
        return found
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        **found,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": cudnn and str(cudnn),
        "driver": driver(),
    }


def commit() -> str | None:
    given = os.environ.get("ERLANGEN_COMMIT")
    if given:
        return given
    name = _said("git", "rev-parse", "--short", "HEAD")
    return name and name + ("+" if _said("git", "status", "--porcelain", "--untracked-files=no", "--", "src") else "")


def driver() -> str | None:
    lines = (_said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").splitlines()
    return lines[0].strip() if lines else None


def _said(*command: str) -> str | None:
    """What a command prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
