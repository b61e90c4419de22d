"""When a run is evaluated, kept and stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from erlangen.training.config import TrainConfig


def is_evaluation(config: TrainConfig, done: int) -> bool:
    """``evaluations`` times, evenly, the last step included."""
    return _due(config.evaluations, config.steps, done)


def is_checkpoint(config: TrainConfig, done: int) -> bool:
    """``checkpoints`` times, evenly."""
    return _due(config.checkpoints, config.steps, done)


def _due(times: int, steps: int, done: int) -> bool:
    return done * times // steps > (done - 1) * times // steps


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask for a stop at the end of the step; a second one does not wait."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: somebody else handles signals
        before = {}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
