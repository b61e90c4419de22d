"""Linear layers with any number of token dimensions: y = x Wᵀ + b."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.pieces import Dense, Outer, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.tape import Tape


def tokens(t: Tensor, views: int) -> Tensor:
    """[n·V, …, width] → [n, V·T, width]"""
    return t.reshape(t.shape[0] // views, views * t[0].numel() // t.shape[-1] if t.shape[0] else 1, t.shape[-1])


@rule(nn.Linear)
def linear(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    return tapped_linear(tape, input, module.weight, module.bias)


def tapped_linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, batch_dim: int | None = None) -> Tensor:
    """A linear map whose weight and bias gradients the tape records row by row."""
    out = F.linear(x, weight.detach(), None if bias is None else bias.detach())

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        a, d = tokens(saved[0], views), tokens(cotangent, views)
        if weight.requires_grad:
            yield weight, Outer(a, d)
        if bias is not None and bias.requires_grad:
            yield bias, Dense(d[:, 0] if d.shape[1] == 1 else d.sum(1))

    return tape.tap(out, (x,), (weight, bias), pieces, tape.batch_dim(x) if batch_dim is None else batch_dim)
