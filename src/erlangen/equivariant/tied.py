"""Where the copies of each coefficient lie in a dense kernel: what the fused coefficient gradient reads.

For regular and other permutation fields of a grid symmetry, the d rows of an output field hold the same orbit sums, each
in its own order. The tables here list, for every copy, which entry of its row [taps, channels] belongs to which
coefficient, in the order of the first copy, so that the kernel reads memory almost in sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from erlangen.equivariant.expansion import KernelBlock, KernelExpansion
from erlangen.gradients.kernels.tied_sum import Standardisation, reference, tied_sum


@dataclass(frozen=True)
class TiedCopies:
    """Tables of one layer. ``order[q]`` is the coefficient at place q; ``mix`` maps orbit sums to coefficients, if dense."""

    fields: int
    copies: int
    source: Tensor
    scale: Tensor | None
    mix: Tensor | None
    order: Tensor

    def to(self, device: torch.device) -> TiedCopies:
        move = lambda t: None if t is None else t.to(device)  # noqa: E731
        return TiedCopies(
            self.fields, self.copies, self.source.to(device), move(self.scale), move(self.mix), self.order.to(device)
        )


def tied_block(expansion: KernelExpansion) -> KernelBlock | None:
    """The one block of a layer from one kind of field to one other, by orbits; None of any other layer."""
    if len(expansion.blocks) != 1 or expansion.in_order is not None or expansion.out_order is not None:
        return None
    block = next(iter(expansion.blocks.values()))
    assert isinstance(block, KernelBlock)
    return None if block.members is None else block


def tied_copies(expansion: KernelExpansion) -> TiedCopies | None:
    """The tables of a layer from one kind of field to one other, by orbits; None for any other layer."""
    block = tied_block(expansion)
    if block is None or expansion.get_buffer("mean_0").shape[0] > 1:
        return None
    assert block.members is not None
    taps, channels = block.size**2, block.fields_in * block.d_in
    members = block.members.cpu()  # [copies, orbits]: entry (element, tap) of each copy's row
    element, tap = members // taps, members % taps
    field = torch.arange(block.fields_in)[:, None]
    # [copies, fields in, orbits] → place in [taps, channels]
    source = tap[:, None] * channels + field * block.d_in + element[:, None]
    source = source.flatten(1)
    mix = None if block.mix is None else block.mix.detach().float().cpu()
    diagonal = mix is None or (mix.shape[0] == mix.shape[1] and torch.equal(mix, mix.diag().diag()))
    if not diagonal:  # orbit sums in their own order, then a product
        order = torch.arange(block.fields_in * block.dimension)
        return TiedCopies(block.fields_out, block.d_out, source.int(), None, mix, order)
    order = source[0].argsort()
    scale = None if mix is None else mix.diag().repeat(block.fields_in)[order].contiguous()
    return TiedCopies(block.fields_out, block.d_out, source[:, order].int().contiguous(), scale, None, order)


@torch.no_grad()
def jacobian(expansion: KernelExpansion, theta: Tensor, eps: float, order: Tensor) -> Standardisation:
    """The transposed Jacobian of standardisation at θ, in the tables' order."""
    (row,) = expansion.rows(theta.float())
    centred = expansion._centre(0, row)
    deviation = expansion._deviation(0, centred, eps)
    unit = centred / deviation
    along = expansion._gram(0, unit) / expansion.out_type.distinct[0].size
    mean = expansion.get_buffer("mean_0")
    a = mean[0] if len(mean) else row.new_zeros(row.shape[1])
    u, b, a = (t[..., order].contiguous() for t in (unit, along, a))
    return Standardisation(u, b, (1 / deviation).flatten().contiguous(), a)


def coefficient_gradients(
    kernels: Tensor, tables: TiedCopies, standard: Standardisation | None, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Every owner's coefficient gradient in the tables' order, [n, coefficients], and the squared norm of what that holds, [n].

    ``kernels`` [n, C_out, taps, C_in] are gradients of the dense kernel; ``fused=False`` asks for the plain twin.
    """
    run = tied_sum if fused else reference
    rows = kernels.contiguous().view(len(kernels), tables.fields, tables.copies, -1)
    kept = torch.bfloat16 if kernels.dtype == torch.bfloat16 else torch.float32  # as the kernel gradients, read by the sum
    if tables.mix is None:
        g, norms = run(rows, tables.source, tables.scale, standard, kept)
        return g.flatten(1), norms
    sums, _ = run(rows, tables.source, None, None)
    mixed = (sums.unflatten(-1, (-1, len(tables.mix))) @ tables.mix).reshape(len(kernels), tables.fields, 1, -1)
    identity = torch.arange(mixed.shape[-1], device=mixed.device, dtype=torch.int32)[None]
    g, norms = run(mixed, identity, None, standard, kept)
    return g.flatten(1), norms
