"""Embedding tables: the gradient of a row is a handful of table entries, never a whole table per sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.fallback import functional
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


@rule(nn.EmbeddingBag)
def embedding_bag(
    module: nn.EmbeddingBag,
    tape: Tape,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Sums and means of table rows: every token gets its share of the bag's cotangent. A maximum goes to the fallback."""
    if input.ndim != 2:
        raise ValueError(
            "EmbeddingBag was given one list of tokens with offsets, in which no dimension is the batch: pass [batch, length], "
            "padded with padding_idx"
        )
    if module.mode == "max":
        return functional(module, tape, input)  # type: ignore[no-any-return]
    weight = module.weight
    out = F.embedding_bag(
        input, weight.detach(), None, mode=module.mode, per_sample_weights=per_sample_weights, padding_idx=module.padding_idx
    )
    share = torch.ones_like(input, dtype=out.dtype) if per_sample_weights is None else per_sample_weights.detach()
    if module.padding_idx is not None:
        share = torch.where(input == module.padding_idx, 0.0, share)
    if module.mode == "mean":
        share = share / share.sum(1, keepdim=True).clamp(min=1.0)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        index, share = saved
        owners, length = index.shape[0] // views, views * index.shape[1]
        d = (cotangent[:, None] * share[..., None]).reshape(owners, length, weight.shape[1])
        yield weight, Lookup(index.reshape(owners, length), d, weight.shape[0])

    return tape.tap(out, (input, share), (weight,), pieces)
