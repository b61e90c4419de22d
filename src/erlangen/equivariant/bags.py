"""Coefficient gradients on a CPU: kernel gradients are formed so that tied copies are added up in whole runs of memory.

The d rows of an output field hold the same orbit sums, each in an order of its own (see `tied`). With the rows of all fields
innermost, [window, copy, field], an orbit sum of one owner is the sum of d runs of as many numbers as there are fields, for all
of them at once: what PyTorch calls a bag of an embedding. Kernel gradients exist for a few owners at a time and are read
where they lie in the cache, once; entry by entry they would be written and read twice more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.equivariant.expansion import KernelBlock, KernelExpansion
from erlangen.equivariant.tied import tied_block
from erlangen.gradients.tracing import is_followed

if TYPE_CHECKING:
    from erlangen.gradients.rules.conv import Conv

#: fields out below which the runs are too short to be worth the calls
FEWEST = 8

#: rows of [window, copy] that make each orbit sum of so many owners, [owners·L, copies], by which axis of a window is innermost
_PLACES: WeakKeyDictionary[KernelExpansion, dict[bool, Tensor]] = WeakKeyDictionary()


def suits(conv: Conv, expansion: KernelExpansion) -> bool:
    """Whether bags are the faster way: on a CPU, in full precision, where windows are formed anyway."""
    block, wide = tied_block(expansion), conv.d.dtype in (torch.float32, torch.float64)
    here = wide and conv.d.device.type == "cpu" and not is_followed() and conv.count > 0
    return here and block is not None and block.fields_out >= FEWEST and conv.by_windows()


@torch.no_grad()
def coefficient_gradients(conv: Conv, expansion: KernelExpansion) -> Tensor:
    """[n, coefficients], as `KernelExpansion.pullback` of the kernel gradients."""
    block = tied_block(expansion)
    assert block is not None
    fields, copies, owners, tokens = block.fields_out, block.d_out, conv.count, conv.tokens
    outputs, inner = fields * copies, math.prod(conv.shape[1:])
    size, last = conv.part(inner * max(tokens, outputs)), conv.channels_innermost()
    places = _places(expansion, block, last, size)
    windows, length = conv.windows_of(last, size), len(places) // size
    d = conv.cotangents().view(owners, fields, copies, tokens).permute(0, 3, 2, 1).reshape(owners, tokens, outputs)
    kernels, sums = d.new_empty(size, inner, outputs), d.new_empty(owners, fields, length)
    for start in range(0, owners, size):
        stop = min(owners, start + size)
        held = windows(start, stop)
        a = held.view(-1, tokens, inner).mT if last else held.view(-1, inner, tokens)
        part = torch.bmm(a, d[start:stop], out=kernels[: stop - start])
        bags = F.embedding_bag(places[: (stop - start) * length], part.view(-1, fields), mode="sum")
        sums[start:stop] = bags.view(-1, length, fields).mT
    return (sums if block.mix is None else sums.unflatten(-1, (block.fields_in, -1)) @ block.mix).flatten(1)


def _places(expansion: KernelExpansion, block: KernelBlock, last: bool, owners: int) -> Tensor:
    """Kept from step to step; those of fewer owners are the first of those of more."""
    taps, channels = block.size**2, block.fields_in * block.d_in
    known, length = _PLACES.setdefault(expansion, {}), block.fields_in * block.members.shape[1]  # type: ignore[union-attr]
    if last not in known or len(known[last]) < owners * length:
        element, tap = block.members // taps, block.members % taps  # type: ignore[operator]
        channel = torch.arange(block.fields_in)[:, None] * block.d_in + element[:, None]  # [copies, fields in, orbits]
        entry = tap[:, None] * channels + channel if last else channel * taps + tap[:, None]
        row = entry * block.d_out + torch.arange(block.d_out)[:, None, None]
        first = torch.arange(owners) * (channels * taps * block.d_out)
        known[last] = (first[:, None, None] + row.flatten(1).T).flatten(0, 1).int()
    return known[last][: owners * length]
