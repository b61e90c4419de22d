"""Where the copies of each coefficient lie in a dense kernel: what the fused coefficient gradient reads.

For regular and other permutation fields of a grid symmetry, the d rows of an output field hold the same orbit sums, each
in its own order. The tables here list, for every copy, which entry of its row [taps, channels] belongs to which
coefficient, in the order of the first copy, so that the kernel reads memory almost in sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erlangen.equivariant.expansion import KernelBlock, KernelExpansion
from erlangen.gradients.kernels import conv_copies, tuned
from erlangen.gradients.kernels.tied_sum import Standardisation, reference, tied_sum


@dataclass(frozen=True)
class TiedCopies:
    """Tables of one layer. ``order[q]`` is the coefficient at place q; ``mix`` maps orbit sums to coefficients, if dense."""

    channels: int
    fields: int
    copies: int
    source: Tensor
    scale: Tensor | None
    mix: Tensor | None
    order: Tensor

    def to(self, device: torch.device) -> TiedCopies:
        return _moved(self, device)


@dataclass(frozen=True)
class Blocks:
    """The same in blocks of ``width`` entries that the copies only exchange among themselves, as `conv_copies` wants them.

    ``columns`` [L] are the entries, ``local`` [copies, L and zeros to the end of a block] where in its block a copy has the
    coefficient of each place, ``vector`` how many neighbours there lie side by side in memory. ``sums`` are the tables of what
    has been added up, ``kernels`` those of kernel gradients that are stored after all; both end in the same order.
    """

    width: int
    vector: int
    columns: Tensor
    local: Tensor
    kernels: TiedCopies
    sums: TiedCopies

    def to(self, device: torch.device) -> Blocks:
        return replace(_moved(self, device), kernels=self.kernels.to(device), sums=self.sums.to(device))


def _moved(tables: Any, device: torch.device) -> Any:
    tensors = {f.name: t for f in fields(tables) if isinstance(t := getattr(tables, f.name), Tensor)}
    return replace(tables, **{name: t.to(device) for name, t in tensors.items()})


def tied_copies(expansion: KernelExpansion) -> TiedCopies | None:
    """The tables of a layer from one kind of field to one other, by orbits; None for any other layer."""
    if len(expansion.blocks) != 1 or expansion.in_order is not None or expansion.out_order is not None:
        return None
    block = next(iter(expansion.blocks.values()))
    assert isinstance(block, KernelBlock)
    if block.members is None or expansion.get_buffer("mean_0").shape[0] > 1:
        return None
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
        return TiedCopies(channels, block.fields_out, block.d_out, source.int(), None, mix, order)
    order = source[0].argsort()
    scale = None if mix is None else mix.diag().repeat(block.fields_in)[order].contiguous()
    return TiedCopies(channels, block.fields_out, block.d_out, source[:, order].int().contiguous(), scale, None, order)


def blocks_of(tables: TiedCopies, width: int) -> Blocks | None:
    """None where copies are not a power of two, or exchange entries that no block of this width holds."""
    source = tables.source.cpu().numpy().astype(np.int64)
    copies, length = source.shape
    whole = all(len(np.unique(row)) == length == row.max() + 1 for row in source)
    if not whole or not conv_copies.fits(tables.fields, copies):
        return None
    orbit = _orbits(source[:, np.argsort(source[0])])
    size = np.bincount(orbit)[orbit]
    if (size & (size - 1)).any() or size.max() > width:
        return None
    # large ones first: powers of two that fall never meet the end of a block in their middle
    columns = np.lexsort((np.arange(length), orbit, -size))
    columns = np.concatenate([np.sort(columns[k : k + width]) for k in range(0, length, width)])
    place, coefficient = np.argsort(columns), np.argsort(source[0])[columns]
    local = np.pad(place[source[:, coefficient]] % width, ((0, 0), (0, -length % width))).astype(np.int32, order="C")
    vector, entries = _side_by_side(columns, tables.channels), torch.from_numpy(columns).int()
    found = Blocks(width, vector, entries, torch.from_numpy(local), tables, tables)
    if tables.mix is not None:  # sums are mixed in their own order
        own = torch.from_numpy(place[source[:1]]).int()
        return replace(found, sums=replace(tables, copies=1, source=own))
    there = torch.from_numpy(coefficient)
    scale = None if tables.scale is None else tables.scale.cpu()[there]
    kernels = replace(tables, source=tables.source.cpu()[:, there].contiguous(), scale=scale, order=tables.order.cpu()[there])
    own = torch.arange(length, dtype=torch.int32)[None]
    return replace(found, kernels=kernels, sums=replace(kernels, copies=1, source=own))


def _orbits(permutations: np.ndarray) -> np.ndarray:
    """The first entry among those that permutations [copies, L] make of each, [L]."""
    orbit = np.arange(permutations.shape[1])
    while True:
        least = np.minimum(orbit, orbit[permutations].min(0))
        if np.array_equal(least, orbit):
            return orbit
        orbit = least


def _side_by_side(columns: np.ndarray, channels: int) -> int:
    """The largest run of one tap, a power of two up to 8, of which all columns are made, and at whose multiples it begins."""
    for run in (8, 4, 2):
        if len(columns) % run == 0 == channels % run:
            runs = columns.reshape(-1, run)
            if (runs[:, 0] % run == 0).all() and (runs == runs[:, :1] + np.arange(run)).all():
                return run
    return 1


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
    """Every owner's coefficient gradient in the tables' order, [n, coefficients], and its squared norm, [n].

    ``kernels`` [n, C_out, taps, C_in] are gradients of the dense kernel; ``fused=False`` asks for the plain twin.
    """
    run = tied_sum if fused else reference
    rows = kernels.contiguous().view(len(kernels), tables.fields, tables.copies, -1)
    kept = torch.bfloat16 if kernels.dtype == torch.bfloat16 else torch.float32  # as they were stored before: read by the sum
    if tables.mix is None:
        g, norms = run(rows, tables.source, tables.scale, standard, kept)
        return g.flatten(1), norms
    sums, _ = run(rows, tables.source, None, None)
    mixed = (sums.unflatten(-1, (-1, len(tables.mix))) @ tables.mix).reshape(len(kernels), tables.fields, 1, -1)
    identity = torch.arange(mixed.shape[-1], device=mixed.device, dtype=torch.int32)[None]
    g, norms = run(mixed, identity, None, standard, kept)
    return g.flatten(1), norms


def summed_gradients(
    x: Tensor, d: Tensor, views: int, plane: tuple[Any, Any, Any, Any], blocks: Blocks, standard: Standardisation | None,
    setting: tuned.Copies,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`coefficient_gradients` from a convolution's inputs and cotangents, without kernel gradients in memory."""
    sums = conv_copies.conv_copies(x, d, views, *plane, blocks.columns, blocks.local, blocks.width, blocks.vector, setting)
    return coefficient_gradients(sums, blocks.sums, standard)
