"""Embedding tables: the gradient of a row is a handful of table entries, never a whole table per sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.pieces import Lookup, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.tape import Tape


@rule(nn.Embedding)
def embedding(module: nn.Embedding, tape: Tape, input: Tensor) -> Tensor:
    weight = module.weight
    out = F.embedding(input, weight.detach())

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        owners = cotangent.shape[0] // views
        length = views * (saved[0][0].numel() if saved[0].shape[0] else 1)
        index, d = saved[0].reshape(owners, length), cotangent.reshape(owners, length, weight.shape[1])
        if module.padding_idx is not None:
            d = torch.where((index == module.padding_idx)[..., None], 0.0, d)
        yield weight, Lookup(index, d, weight.shape[0])

    return tape.tap(out, (input,), (weight,), pieces, tape.batch_dim(input, 0))
