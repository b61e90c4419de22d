"""Curves for TensorBoard: what `metrics.jsonl` says, and nothing that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from erlangen.extras import require

if TYPE_CHECKING:
    from erlangen.training.session import Session


class Board:
    """A watcher of a run that writes public test metrics and ε; statistics without a guarantee only if they were on."""

    def __init__(self, folder: Path) -> None:
        require("--tensorboard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make, self._last = folder, SummaryWriter, -1
        self._writer: Any = None

    def __call__(self, session: Session, metrics: dict[str, Any]) -> None:
        step = metrics.get("step", -1)
        if step == self._last or step != session.step_count:  # every step is watched, some are evaluated
            return
        self._last = step
        if self._writer is None:  # not before the run owns its folder
            self._writer = self._make(str(self._folder))
        for name, value in _flat(metrics):
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _flat(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    out: list[tuple[str, float]] = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            out += _flat(value, f"{prefix}{name}/")
        elif name != "step" and isinstance(value, (int, float)):
            out.append((prefix + name, float(value)))
    return out
