"""Augmentation on tensors, on the device, from a derived stream: views of the same record share its privacy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def views(x: Tensor, count: int, kind: str, generator: torch.Generator) -> Tensor:
    """[n, C, H, W] → [n·count, C, H, W], owner-major. The first view is the record itself when there are several."""
    if kind == "none":
        return x if count == 1 else x.repeat_interleave(count, 0)
    repeated = x.repeat_interleave(count, 0)
    changed = _crop(repeated, 4 if kind == "flip-crop" else 1, generator)
    if kind == "flip-crop":
        flip = torch.rand(len(changed), generator=generator, device=generator.device).to(x.device) < 0.5
        changed = torch.where(flip.view(-1, 1, 1, 1), changed.flip(3), changed)
    if count > 1:
        changed[::count] = x
    return changed


def _crop(x: Tensor, margin: int, generator: torch.Generator) -> Tensor:
    """A random crop of the reflect-padded image, gathered without a loop over samples."""
    n, _, height, width = x.shape
    padded = F.pad(x, [margin] * 4, mode="reflect")
    offset = torch.randint(0, 2 * margin + 1, (2, n), generator=generator, device=generator.device).to(x.device)
    rows = offset[0][:, None] + torch.arange(height, device=x.device)
    columns = offset[1][:, None] + torch.arange(width, device=x.device)
    index = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
