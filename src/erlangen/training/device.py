"""Where a run computes."""

from __future__ import annotations

import torch

from erlangen.training.config import ConfigError
from erlangen.workers import Workers, local_rank


def pick_device(name: str, workers: Workers | None = None) -> str:
    """The device behind cpu, cuda, cuda:N, mps or auto; of several workers each has its own GPU."""
    own = "cuda" if workers is None or workers.alone else f"cuda:{local_rank() % max(1, torch.cuda.device_count())}"
    if name == "auto":
        return own if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or not (not index or index.isdigit()):
        raise ConfigError(f"device is {name!r}; give cpu, cuda, cuda:N, mps or auto")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} but this PyTorch sees no GPU; use --device cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r} but there are {torch.cuda.device_count()} GPUs; give cuda:0 or another of them"
        )
    return own if name == "cuda" else name
