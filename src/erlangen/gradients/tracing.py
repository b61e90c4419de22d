"""While every operation on tensors is followed into a graph: no kernel that cannot be seen into, no look at a value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

#: of the process, not of a thread: backward passes on a GPU have threads of their own
_followed = False


@contextmanager
def followed() -> Iterator[None]:
    """Inside, plain PyTorch computes everything, the same way for all values."""
    global _followed
    before, _followed = _followed, True
    try:
        yield
    finally:
        _followed = before


def is_followed() -> bool:
    return _followed


def as_on_gpu(t: Tensor) -> bool:
    """Whether few large operations are wanted, and none that depends on values: the host does not wait for a GPU, and a graph is
    the same for all values."""
    return t.is_cuda or _followed
