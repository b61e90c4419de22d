"""Answers averaged over views: the network is asked about an image as it is, moved a little and mirrored.

Private training leaves noise in the weights, and it errs otherwise for every view; their mean errs less. The views are such as the
network was trained on (`augment`), and the weights were released before anybody asked: it costs no privacy, only the time of a
prediction for every view (measured: docs/results/cifar.md).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.data.augment import KINDS

#: where an image is looked at
PLACES = 5


class Averaged(nn.Module):
    """Logits of the mean probability over fixed views: as it is, moved half a crop's reach to each corner, and all of them mirrored
    if training mirrors."""

    def __init__(self, model: nn.Module, augment: str) -> None:
        super().__init__()
        margin, self.mirror, _ = KINDS[augment]
        if not margin:
            moving = ", ".join(name for name, kind in KINDS.items() if kind.margin)
            raise ValueError(
                f"augment is {augment!r}: the network was trained on images that stay where they are, and has no views to average "
                f"over; train with augment {moving}, or leave average_views out"
            )
        self.model, self.reach = model, max(1, margin // 2)

    @property
    def count(self) -> int:
        """How many views there are of an image."""
        return PLACES * (2 if self.mirror else 1)

    def forward(self, x: Tensor) -> Tensor:
        answers = self.model(torch.cat(self.views(x))).float().log_softmax(1)
        return answers.unflatten(0, (self.count, -1)).logsumexp(0) - math.log(self.count)

    def views(self, x: Tensor) -> list[Tensor]:
        """[n, C, H, W], each of them; edges are continued by their mirror images, as in training."""
        padded, reach = F.pad(x, [self.reach] * 4, mode="reflect"), self.reach
        low, middle, high = (slice(start, start - 2 * reach or None) for start in (0, reach, 2 * reach))
        corners = [(rows, columns) for rows in (low, high) for columns in (low, high)]
        moved = [padded[:, :, rows, columns] for rows, columns in ((middle, middle), *corners)]
        return [*moved, *(view.flip(3) for view in moved)] if self.mirror else moved


def answering(model: nn.Module, average: bool, augment: str) -> nn.Module:
    """The network as it is to be asked: by itself, or averaged over views."""
    return Averaged(model, augment) if average else model


def rows_at_once(model: nn.Module, rows: int) -> int:
    """How many images are asked about at a time, so that all their views are no more than ``rows``."""
    return max(1, rows // model.count) if isinstance(model, Averaged) else rows
