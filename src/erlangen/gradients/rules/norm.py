"""Normalisations with an affine part: the statistics are per sample, so only weight and bias need a rule.

The normalised input x̂ is recomputed in the backward pass from the input that the native kernel keeps anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.constant_norm import ConstantNorm
from erlangen.gradients.joined import apply as joined
from erlangen.gradients.joined import norm_layer, suits
from erlangen.gradients.kernels.norm_act import NormAct
from erlangen.gradients.pieces import Dense, Piece
from erlangen.gradients.registry import rule
from erlangen.gradients.tape import Tape


def tapped_affine(
    tape: Tape,
    x: Tensor,
    normalise: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    per_row: Callable[[Tensor], Tensor],
    batch_dim: int = 0,
) -> Tensor:
    """out = x̂·weight + bias; ``per_row`` sums [rows, …] over everything the affine parameters are shared over."""
    fixed = [None if p is None else p.detach() for p in (weight, bias)]
    out = normalise(x, *fixed)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        owners = lambda t: per_row(t).unflatten(0, (-1, views)).sum(1)  # noqa: E731
        if weight is not None and weight.requires_grad:
            yield weight, Dense(owners(cotangent * normalise(saved[0], None, None)))
        if bias is not None and bias.requires_grad:
            yield bias, Dense(owners(cotangent))

    return tape.tap(out, (x,), (weight, bias), pieces, batch_dim)


def over_positions(t: Tensor) -> Tensor:
    """[rows, C, …] → [rows, C]"""
    return t.flatten(2).sum(2) if t.ndim > 2 else t


@rule(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, tape: Tape, input: Tensor) -> Tensor:
    spec = NormAct(module.num_groups, module.eps)
    if (norm := norm_layer(module)) is not None and suits(input, spec):
        return joined(input, norm, spec, tape)
    run = lambda x, w, b: F.group_norm(x, module.num_groups, w, b, module.eps)  # noqa: E731
    return tapped_affine(tape, input, run, module.weight, module.bias, over_positions)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(module: nn.InstanceNorm2d, tape: Tape, input: Tensor) -> Tensor:
    module._check_input_dim(input)
    run = lambda x, w, b: F.group_norm(x, module.num_features, w, b, module.eps)  # noqa: E731
    return tapped_affine(tape, input, run, module.weight, module.bias, over_positions)


@rule(ConstantNorm)
def constant_norm(module: ConstantNorm, tape: Tape, input: Tensor) -> Tensor:
    return tapped_affine(tape, input, module.normalise, module.weight, module.bias, over_positions)


def _over_tokens(inner: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.flatten(1, t.ndim - inner - 1).sum(1) if t.ndim > inner + 1 else t


@rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, tape: Tape, input: Tensor) -> Tensor:
    shape = module.normalized_shape
    run = lambda x, w, b: F.layer_norm(x, shape, w, b, module.eps)  # noqa: E731
    return tapped_affine(
        tape, input, run, module.weight, module.bias, _over_tokens(len(shape)), tape.batch_dim(input, len(shape))
    )


@rule(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, tape: Tape, input: Tensor) -> Tensor:
    shape = tuple(module.normalized_shape)
    run = lambda x, w, b: F.rms_norm(x, shape, w, module.eps)  # noqa: E731
    return tapped_affine(
        tape, input, run, module.weight, None, _over_tokens(len(shape)), tape.batch_dim(input, len(shape))
    )
