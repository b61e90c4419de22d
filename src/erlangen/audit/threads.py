"""Audits work on tiny tensors, for which a pool of threads costs more than it saves (tenfold on a busy machine)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

Result = TypeVar("Result")


def single_threaded(function: Callable[..., Result]) -> Callable[..., Result]:
    """Run with one torch thread; the setting of the caller comes back afterwards."""

    @wraps(function)
    def run(*args: object, **options: object) -> Result:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **options)
        finally:
            torch.set_num_threads(before)

    return run
