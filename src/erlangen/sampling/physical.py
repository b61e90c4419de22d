"""How many rows fit in memory at once."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor, nn

from erlangen.gradients.tape import Tape


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; on the CPU what the system says is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def bytes_per_row(module: nn.Module, tape: Tape, inputs: tuple[Tensor, ...]) -> int:
    """What one more row costs: activations and their cotangents, and per-sample gradients kept to the end."""
    held = 0

    def count(_module: nn.Module, _args: object, out: object) -> None:
        nonlocal held
        held += sum(
            t.numel() * t.element_size() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)
        )

    hooks = [m.register_forward_hook(count) for m in module.modules()]
    try:
        out = module(*inputs)
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        rows = inputs[0].shape[0]
        dense = sum(p.element_size() * p.numel() for p in tape.parameters.values())
        return 3 * held // max(rows, 1) + dense
    finally:
        tape.clear()
        for hook in hooks:
            hook.remove()


def find_physical_batch(
    module: nn.Module, tape: Tape, inputs: tuple[Tensor, ...], share: float = 0.4, budget: int | None = None
) -> int:
    """The largest power of two of rows whose step fits in ``share`` of the free memory (or in ``budget`` bytes)."""
    room = int(available_bytes(inputs[0].device) * share) if budget is None else budget
    rows = max(1, room // max(1, bytes_per_row(module, tape, inputs)))
    return 1 << (rows.bit_length() - 1)


def static_rows(expected: float) -> int:
    """Rows of padded batches for a Poisson batch of this size: a multiple of 8 that one batch in a billion exceeds.

    Six standard deviations; a longer batch continues in another physical batch, nothing is cut off.
    """
    return 8 * math.ceil((expected + 6.0 * math.sqrt(expected) + 1.0) / 8)
