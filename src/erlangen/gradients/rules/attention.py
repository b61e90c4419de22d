"""Multi-head attention: three tapped projections, attention itself has no parameters, one tapped projection out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.pieces import Dense, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.rules.linear import tapped_linear
from erlangen.gradients.tape import Tape


def tapped_rows(tape: Tape, parameter: Tensor, rows: int) -> Tensor:
    """A copy of a raw parameter for each row, with per-row gradients: class tokens, positional embeddings, biases."""
    out = parameter.detach().expand(rows, *parameter.shape).clone()

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield parameter, Dense(cotangent.unflatten(0, (-1, views)).sum(1))

    return tape.tap(out, (), (parameter,), pieces)


@rule(nn.MultiheadAttention)
def attention(
    module: nn.MultiheadAttention,
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if query.ndim != 3:
        raise ValueError(f"MultiheadAttention got a query of shape {tuple(query.shape)}; keep the batch dimension")
    same = query is key and key is value
    if not module.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if same:
            key = value = query
    rows, targets, width = query.shape
    q, k, v = _project(module, tape, query, key, value, same)
    heads, head = module.num_heads, width // module.num_heads
    mask = _mask(module, attn_mask, key_padding_mask, rows, q.dtype)

    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, tapped_rows(tape, module.bias_k, rows).view(rows, 1, width)], 1)
        v = torch.cat([v, tapped_rows(tape, module.bias_v, rows).view(rows, 1, width)], 1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    if module.add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(rows, 1, width)], 1) for t in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))

    q, k, v = (t.unflatten(2, (heads, head)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(head)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    mixed = F.dropout(weights, module.dropout, module.training) @ v
    out = tapped_linear(
        tape, mixed.transpose(1, 2).reshape(rows, targets, width), module.out_proj.weight, module.out_proj.bias, 0
    )
    if not module.batch_first:
        out = out.transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


def _project(
    module: nn.MultiheadAttention, tape: Tape, query: Tensor, key: Tensor, value: Tensor, same: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bias = module.in_proj_bias
    if module.in_proj_weight is not None and same:
        q, k, v = tapped_linear(tape, query, module.in_proj_weight, bias, 0).chunk(3, -1)
        return q, k, v
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    inputs = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (tapped_linear(tape, x, w, b, 0) for x, w, b in inputs)
    return q, k, v


def _mask(
    module: nn.MultiheadAttention, attn: Tensor | None, padding: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one additive term, broadcastable to [rows, heads, targets, sources]."""
    additive = lambda m: torch.zeros_like(m, dtype=dtype).masked_fill_(m, -math.inf) if m.dtype == torch.bool else m  # noqa: E731
    total = None
    if attn is not None:
        attn = additive(attn)
        total = attn if attn.ndim == 2 else attn.view(rows, module.num_heads, *attn.shape[1:])
    if padding is not None:
        padded = additive(padding)[:, None, None, :]
        total = padded if total is None else total + padded
    return total
