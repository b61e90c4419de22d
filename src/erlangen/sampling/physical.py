"""How many rows fit in memory at once.

`find_physical_batch` asks what is free now. `fitting_rows` does not: a run that nobody gave a number is cut alike when it goes on
tomorrow, and adds in the same order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from erlangen.gradients.memory import attributes_untouched, untouched
from erlangen.gradients.tape import Tape

#: of all of a device's memory, and on a CPU no more than so many bytes: larger parts are no faster there
SHARE, ON_CPU = 0.4, 4 << 30


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; on the CPU what the system says is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def total_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[int]]:
    """The bytes of every layer's output, as they are made. A block's own is its last layer's, and not counted again."""
    made: list[int] = []

    def count(_module: nn.Module, _args: object, out: object) -> None:
        outputs = (t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))
        made.append(sum(t.numel() * t.element_size() for t in outputs))

    layers = (m for m in module.modules() if next(m.children(), None) is None)
    hooks = [m.register_forward_hook(count) for m in layers]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def _per_row(made: list[int], rows: int, parameters: Iterable[Tensor]) -> int:
    """Activations, their cotangents and what is made on the way, and per-sample gradients kept to the end."""
    return 3 * sum(made) // max(rows, 1) + sum(p.element_size() * p.numel() for p in parameters)


def bytes_per_row(module: nn.Module, tape: Tape, inputs: tuple[Tensor, ...]) -> int:
    """What one more row costs a step of a module whose gradients are recorded."""
    try:
        with _counted(module) as made:
            out = module(*inputs)
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        return _per_row(made, inputs[0].shape[0], tape.parameters.values())
    finally:
        tape.clear()


def find_physical_batch(module: nn.Module, tape: Tape, inputs: tuple[Tensor, ...]) -> int:
    """The largest power of two of rows whose step fits in two fifths of the free memory."""
    return _within(int(available_bytes(inputs[0].device) * SHARE), bytes_per_row(module, tape, inputs))


def fitting_rows(module: nn.Module, shape: tuple[int, ...], device: torch.device) -> int:
    """The largest power of two of rows of this shape whose step a device has room for, whatever else uses it now. The module may
    still be elsewhere, in host memory."""
    room = int(SHARE * total_bytes(device))
    here = next((p.device for p in module.parameters()), device)
    with untouched(module), attributes_untouched(module), torch.no_grad(), _counted(module) as made:
        module(torch.zeros(2, *shape, device=here))
    trained = (p for p in module.parameters() if p.requires_grad)
    return _within(min(room, ON_CPU) if device.type == "cpu" else room, _per_row(made, 2, trained))


def _within(room: int, each: int) -> int:
    rows = max(1, room // max(1, each))
    return 1 << (rows.bit_length() - 1)


def static_rows(expected: float) -> int:
    """Rows of padded batches for a Poisson batch of this size: a multiple of 8, six standard deviations above.

    One large batch in a billion exceeds it, a small one in a million; it continues in another physical batch, nothing is cut off.
    """
    return 8 * math.ceil((expected + 6.0 * math.sqrt(expected) + 1.0) / 8)
