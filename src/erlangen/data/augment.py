"""Augmentation on tensors, on the device, from a derived stream: views of the same record share its privacy.

What happens to each row is drawn for a whole logical batch at once, so that cutting it into physical batches changes
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kind(NamedTuple):
    """Pixels of reflect padding for the random crop, whether to flip, whether to mix the views of a record."""

    margin: int = 0
    flip: bool = False
    mix: bool = False


KINDS = {"none": Kind(), "shift": Kind(1), "flip-crop": Kind(4, flip=True), "flip-crop-mix": Kind(4, flip=True, mix=True)}
#: a view's share of its mixture is one of so many; the last is the whole
SHARES = 256


def draw(rows: int, count: int, kind: str, generator: torch.Generator) -> Tensor:
    """For each of ``rows × count`` views: crop offsets, a flip and its share of a mixture, [rows·count, 4]. The first of
    several is the record."""
    margin, flip, mix = KINDS[kind]
    total, device = rows * count, generator.device
    moves = torch.randint(0, 2 * margin + 1, (total, 3), generator=generator, device=device)
    moves[:, 2] = torch.randint(0, 2, (total,), generator=generator, device=device) if flip else 0
    share = torch.randint(0, SHARES, (total, 1), generator=generator, device=device) if mix else moves.new_full((total, 1), SHARES)
    moves = torch.cat([moves, share], 1)
    if count > 1:
        moves[::count, :2], moves[::count, 2], moves[::count, 3] = margin, 0, SHARES
    return moves


def views(x: Tensor, count: int, kind: str, moves: Tensor) -> Tensor:
    """[n, C, H, W] → [n·count, C, H, W], owner-major, moved as `draw` said. In memory channels come last if they moved."""
    margin, _, mix = KINDS[kind]
    if not margin:  # features of any shape, too
        return x.repeat_interleave(count, 0) if count > 1 else x
    (n, _, height, width), moves = x.shape, moves.to(x.device)
    padded = F.pad(x, [margin] * 4, mode="reflect").permute(0, 2, 3, 1)
    record = torch.arange(n, device=x.device).repeat_interleave(count)
    rows = moves[:, 0, None] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device).expand(len(record), width)
    columns = moves[:, 1, None] + torch.where(moves[:, 2, None] == 1, width - 1 - across, across)
    moved = padded[record[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return _mixed(moved, count, moves[:, 3]) if mix and count > 1 else moved


def _mixed(moved: Tensor, count: int, picked: Tensor) -> Tensor:
    """Every view with the next one of the *same* record, whose label both have: nothing of another record comes in.

    Of u between 0 and 1 a view's share is u⁴/(u⁴ + (1 − u)⁴): mostly nearly nothing or nearly all.
    """
    u = ((picked + 0.5) / SHARES).clamp(max=1.0)
    own = moved.unflatten(0, (-1, count))
    share = (u**4 / (u**4 + (1 - u) ** 4)).view(*own.shape[:2], 1, 1, 1).to(moved.dtype)
    return torch.lerp(own.roll(-1, 1), own, share).flatten(0, 1)
