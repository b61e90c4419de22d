"""Augmentation on tensors, on the device, from a derived stream: views of the same record share its privacy.

What happens to each row is drawn for a whole logical batch at once, so that cutting it into physical batches changes
nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: kind → (pixels of reflect padding for the random crop, whether to flip)
KINDS = {"none": (0, False), "shift": (1, False), "flip-crop": (4, True)}


def draw(rows: int, count: int, kind: str, generator: torch.Generator) -> Tensor:
    """For each of ``rows × count`` views: crop offsets and a flip, [rows·count, 3]. The first of several is the record."""
    margin, flip = KINDS[kind]
    total = rows * count
    moves = torch.randint(0, 2 * margin + 1, (total, 3), generator=generator, device=generator.device)
    moves[:, 2] = torch.randint(0, 2, (total,), generator=generator, device=generator.device) if flip else 0
    if count > 1:
        moves[::count, :2], moves[::count, 2] = margin, 0
    return moves


def views(x: Tensor, count: int, kind: str, moves: Tensor) -> Tensor:
    """[n, C, H, W] → [n·count, C, H, W], owner-major, moved as `draw` said. In memory channels come last if they moved."""
    margin, _ = KINDS[kind]
    if not margin:  # features of any shape, too
        return x.repeat_interleave(count, 0) if count > 1 else x
    (n, _, height, width), moves = x.shape, moves.to(x.device)
    padded = F.pad(x, [margin] * 4, mode="reflect").permute(0, 2, 3, 1)
    record = torch.arange(n, device=x.device).repeat_interleave(count)
    rows = moves[:, 0, None] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device).expand(len(record), width)
    columns = moves[:, 1, None] + torch.where(moves[:, 2, None] == 1, width - 1 - across, across)
    return padded[record[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
