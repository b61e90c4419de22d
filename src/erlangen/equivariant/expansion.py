"""From basis coefficients to dense convolution kernels and back: a linear map, its adjoint, and standardisation.

Coefficients are one flat vector θ. It is the concatenation, over the distinct output representations, of matrices
[fields out, L] whose rows hold, for each distinct input representation, [fields in, basis element]. A row therefore
is everything that reaches one output field.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.equivariant.basis import KernelBasis, pixel_basis, steerable_basis
from erlangen.equivariant.constants import ConstantsModule
from erlangen.equivariant.fields import FieldType
from erlangen.equivariant.kernels import KernelGrid
from erlangen.equivariant.representations import Representation


class KernelBlock(ConstantsModule):
    """Coefficients [..., fields out, fields in, n] ↔ kernels [..., fields out·d_out, fields in·d_in, k, k].

    K = Σ_b θ_b B_b with the basis stored densely, [n, d_out·d_in·k·k]; or, where the kernels are constant on the
    orbits of a grid symmetry, a small mixing matrix and a gather.
    """

    dense: Tensor
    mix: Tensor | None
    entry: Tensor | None
    members: Tensor | None

    def __init__(self, basis: KernelBasis, fields_out: int, fields_in: int) -> None:
        super().__init__()
        self.dimension, self.d_out, self.d_in, self.size, _ = basis.kernels.shape
        self.fields_out, self.fields_in = fields_out, fields_in
        mix = entry = members = None
        if basis.orbits is not None and basis.mix is not None:
            entry = basis.orbits.entry
            identity = basis.mix.shape[0] == basis.mix.shape[1] and np.array_equal(basis.mix, np.eye(len(basis.mix)))
            mix = None if identity else basis.mix
            members = _one_member_per_row(entry, self.d_out)
        self.register_constant("dense", None if members is not None else basis.kernels.reshape(self.dimension, -1))
        self.register_constant("mix", mix)
        self.register_constant("entry", entry)
        self.register_constant("members", members)

    def expand(self, theta: Tensor) -> Tensor:
        if self.entry is not None:
            orbits = theta if self.mix is None else theta @ self.mix.T
            entries = orbits.index_select(-1, self.entry)
        else:
            entries = theta @ self.dense
        taps = self.size * self.size
        kernel = entries.view(self.fields_out, self.fields_in, self.d_out, self.d_in, taps).permute(0, 2, 1, 3, 4)
        return kernel.reshape(self.fields_out * self.d_out, self.fields_in * self.d_in, self.size, self.size)

    def pullback(self, gradient: Tensor) -> Tensor:
        """Adjoint of :meth:`expand`, with any leading dimensions."""
        lead, taps = gradient.shape[:-4], self.size * self.size
        if self.members is not None:
            # Each orbit meets every output element once: put the d_out copies of a filter in one order and add them.
            rows = gradient.reshape(*lead, self.fields_out, self.d_out, self.fields_in, self.d_in * taps)
            total = rows.gather(-1, self.members.unsqueeze(-2).expand_as(rows)).sum(-3)
            return total if self.mix is None else total @ self.mix.to(total.dtype)
        split = gradient.reshape(*lead, self.fields_out, self.d_out, self.fields_in, self.d_in, taps).transpose(-4, -3)
        basis = self.dense.to(split.dtype).view(self.dimension, self.d_out, self.d_in, taps)
        if split.stride(-2) < split.stride(-1):  # channels lie innermost: whole fields are copied, not every ninth entry
            split, basis = split.transpose(-2, -1), basis.transpose(-2, -1)
        return _products(split, basis)


def _products(rows: Tensor, basis: Tensor) -> Tensor:
    """⟨rows [..., a, b, c], basis [n, a, b, c]⟩, [..., n]. 16-bit numbers get zeros beside them: GPUs multiply them by eights."""
    count, numbers = len(basis), basis[0].numel()
    if rows.element_size() != 2 or (count % 8 == 0 and numbers % 8 == 0):
        return _flat(rows) @ basis.flatten(1).T
    high, wide = (-(-size // 8) * 8 for size in (count, numbers))
    padded = rows.new_empty(*rows.shape[:-3], wide)
    padded[..., numbers:] = 0
    padded[..., :numbers].unflatten(-1, rows.shape[-3:]).copy_(rows)
    return (padded @ F.pad(basis.flatten(1), (0, wide - numbers, 0, high - count)).T)[..., :count]


def _flat(t: Tensor) -> Tensor:
    """The last three axes as one. 16-bit numbers are copied four at a time where they lie so: a GPU copies elements, not bytes."""
    fours = t.element_size() == 2 and t.stride(-1) == 1 and t.shape[-1] % 4 == 0
    if fours and all(step % 4 == 0 for step in (t.storage_offset(), *t.stride()[:-1])):
        return t.view(torch.int64).flatten(-3).view(t.dtype)
    return t.flatten(-3)


def _one_member_per_row(entry: np.ndarray, rows: int) -> np.ndarray | None:
    """members[h, p] = place in row h of its one entry that belongs to orbit p; None if some row has none or several."""
    table = entry.reshape(rows, -1)
    count = int(entry.max()) + 1
    if table.shape[1] != count or any(len(np.unique(row)) != count for row in table):
        return None
    return np.argsort(table, axis=1)


@dataclass(frozen=True)
class _RowBlock:
    """The coefficients from one input representation: where they lie in a row."""

    inp: Representation
    start: int
    stop: int


class KernelExpansion(ConstantsModule):
    """The linear map θ → K between two field types; holds only buffers that are rebuilt, none that are saved."""

    def __init__(self, in_type: FieldType, out_type: FieldType, grid: KernelGrid, basis: str = "steerable") -> None:
        super().__init__()
        self.in_type, self.out_type, self.grid, self.basis = in_type, out_type, grid, basis
        self.blocks = nn.ModuleDict()
        self._bases: dict[tuple[int, int], KernelBasis] = {}
        # per distinct output representation: first coefficient, row length, blocks of the row
        self._rows: list[tuple[int, int, list[_RowBlock]]] = []
        start = 0
        for o, out in enumerate(out_type.distinct):
            length, row = 0, []
            for i, inp in enumerate(in_type.distinct):
                found = self._build_basis(inp, out)
                self._bases[o, i] = found
                stop = length + in_type.multiplicity(inp) * found.dimension
                row.append(_RowBlock(inp, length, stop))
                if found.dimension:
                    self.blocks[f"{o}_{i}"] = KernelBlock(found, out_type.multiplicity(out), in_type.multiplicity(inp))
                length = stop
            self._rows.append((start, length, row))
            start += length * out_type.multiplicity(out)
        self.dimension = start
        if start == 0:
            size = f"{grid.size}×{grid.size}"
            raise ValueError(f"no equivariant {size} kernel from {in_type} to {out_type}; use a larger one")
        self.fan_in = in_type.size * grid.size**2
        self._register_order("in", in_type)
        self._register_order("out", out_type)
        for o in range(len(out_type.distinct)):
            self._register_standardisation(o)

    def _build_basis(self, inp: Representation, out: Representation) -> KernelBasis:
        if self.basis == "steerable":
            return steerable_basis(inp, out, self.grid)
        if self.basis == "pixel":
            return pixel_basis(inp, out, self.grid.size)
        raise ValueError(f"unknown basis {self.basis!r}; use 'steerable' or 'pixel'")

    def _register_order(self, side: str, field_type: FieldType) -> None:
        """Kernels are built kind by kind; where fields interleave, a permutation puts the channels in their place."""
        order = np.concatenate([field_type.channels_of(rho).reshape(-1) for rho in field_type.distinct])
        sorted_already = np.array_equal(order, np.arange(field_type.size))
        self.register_constant(f"{side}_order", None if sorted_already else order)
        self.register_constant(f"{side}_place", None if sorted_already else np.argsort(order))

    def _cells(self, o: int) -> list[tuple[_RowBlock, KernelBlock | None, KernelBasis]]:
        cells = []
        for i, block in enumerate(self._rows[o][2]):
            module = self.blocks[f"{o}_{i}"] if self._bases[o, i].dimension else None
            cells.append((block, module, self._bases[o, i]))
        return cells  # type: ignore[return-value]

    def rows(self, theta: Tensor) -> list[Tensor]:
        """θ [..., n] as one matrix [..., fields out, L] per distinct output representation."""
        views = []
        for out, (start, length, _) in zip(self.out_type.distinct, self._rows):
            count = self.out_type.multiplicity(out)
            views.append(theta[..., start : start + count * length].unflatten(-1, (count, length)))
        return views

    def expand(self, theta: Tensor) -> Tensor:
        """The dense kernel [C_out, C_in, k, k] of the coefficients θ [n]."""
        bands = []
        for o, (out, row) in enumerate(zip(self.out_type.distinct, self.rows(theta))):
            band = []
            for block, module, basis in self._cells(o):
                fields_in = self.in_type.multiplicity(block.inp)
                if module is None:
                    shape = (row.shape[0] * out.size, fields_in * block.inp.size, self.grid.size, self.grid.size)
                    band.append(theta.new_zeros(shape))
                else:
                    coefficients = row[:, block.start : block.stop].unflatten(-1, (fields_in, basis.dimension))
                    band.append(module.expand(coefficients))
            bands.append(torch.cat(band, 1) if len(band) > 1 else band[0])
        kernel = torch.cat(bands, 0) if len(bands) > 1 else bands[0]
        if self.out_place is not None:
            kernel = kernel.index_select(0, self.out_place)  # type: ignore[arg-type]
        if self.in_place is not None:
            kernel = kernel.index_select(1, self.in_place)  # type: ignore[arg-type]
        return kernel

    def pullback(self, gradient: Tensor) -> Tensor:
        """Adjoint of :meth:`expand`: kernel gradients [..., C_out, C_in, k, k] → coefficient gradients [..., n].

        ⟨expand(θ), G⟩ = ⟨θ, pullback(G)⟩. The leading dimensions carry per-sample gradients.
        """
        if self.out_order is not None:
            gradient = gradient.index_select(-4, self.out_order)  # type: ignore[arg-type]
        if self.in_order is not None:
            gradient = gradient.index_select(-3, self.in_order)  # type: ignore[arg-type]
        parts, top = [], 0
        for o, out in enumerate(self.out_type.distinct):
            height, left, cells = self.out_type.multiplicity(out) * out.size, 0, []
            for block, module, _ in self._cells(o):
                width = self.in_type.multiplicity(block.inp) * block.inp.size
                if module is not None:
                    cells.append(module.pullback(gradient.narrow(-4, top, height).narrow(-3, left, width)).flatten(-2))
                left += width
            if cells:
                parts.append((torch.cat(cells, -1) if len(cells) > 1 else cells[0]).flatten(-2))
            top += height
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def contract(self, windows: Tensor, cotangents: Tensor) -> Tensor:
        """Coefficient gradients [n, θ] of input windows [n, T, C_in·k·k] and cotangents [n, T, C_out], kernels unformed.

        ⟨Σ_t c_t ⊗ a_t, B⟩ = Σ_t ⟨c_t, B∗a_t⟩: the windows meet the basis first, the cotangents its response. The same
        numbers as :meth:`pullback` of the kernel gradients, cheaper where the positions T are few.
        """
        n, tokens, taps = *windows.shape[:2], self.grid.size**2
        a = windows.view(n, tokens, self.in_type.size, taps)
        if self.in_order is not None:
            a = a.index_select(2, self.in_order)  # type: ignore[arg-type]
        if self.out_order is not None:
            cotangents = cotangents.index_select(2, self.out_order)  # type: ignore[arg-type]
        parts, top = [], 0
        for o, out in enumerate(self.out_type.distinct):
            count = self.out_type.multiplicity(out)
            c = cotangents[..., top : top + count * out.size].unflatten(-1, (count, out.size))
            left, cells = 0, []
            for block, module, _ in self._cells(o):
                fields_in = self.in_type.multiplicity(block.inp)
                width = fields_in * block.inp.size
                if module is not None:
                    fields = a[:, :, left : left + width].reshape(n, tokens, fields_in, block.inp.size * taps)
                    response = fields @ module.dense.to(fields.dtype).view(module.dimension * out.size, -1).T
                    response = response.unflatten(-1, (module.dimension, out.size))
                    cells.append(torch.einsum("ntibd,ntod->noib", response, c).flatten(-2))
                left += width
            if cells:
                parts.append(torch.cat(cells, -1).flatten(-2))
            top += count * out.size
        return torch.cat(parts, -1)

    def contraction_is_cheaper(self, tokens: int) -> bool:
        """Whether :meth:`contract` of this many positions takes fewer products than kernel gradients and their pullback."""
        if any(module.dense is None for module in self.blocks.values()):
            return False
        direct = kernels = 0
        for o, out in enumerate(self.out_type.distinct):
            channels = self.out_type.multiplicity(out) * out.size
            for block, _, basis in self._cells(o):
                fields = self.in_type.multiplicity(block.inp)
                entries = fields * block.inp.size * self.grid.size**2
                direct += tokens * basis.dimension * (entries * out.size + fields * channels)
                kernels += entries * channels * (tokens + basis.dimension)
        return direct < kernels

    # -- scales -----------------------------------------------------------------------------------------------------

    def init_std(self) -> Tensor:
        """Standard deviation of each coefficient at initialisation, [n].

        Steerable: 1/√(number of distinct input irreps that reach the output irrep × number of basis elements from
        that input irrep to it), escnn's generalised He rule. Pixel: 1/√L, L coefficients in the row.
        """
        values = torch.ones(self.dimension)
        for o, row in enumerate(self.rows(values)):
            cells = self._cells(o)
            if self.basis == "pixel":
                row.fill_(row.shape[-1] ** -0.5)
                continue
            count: Counter[tuple[object, int]] = Counter()
            for block, _, basis in cells:
                for label in basis.labels:
                    count[label.in_irrep, label.out_position] += self.in_type.multiplicity(block.inp)
            sources = Counter(position for _, position in count)
            for block, _, basis in cells:
                std = [(sources[b.out_position] * count[b.in_irrep, b.out_position]) ** -0.5 for b in basis.labels]
                row[:, block.start : block.stop] = torch.tensor(std).repeat(self.in_type.multiplicity(block.inp))
        return values

    def paper_scale(self) -> Tensor:
        """m_i = √(2 / (n_in·E‖B_i∗x‖²)) of each coefficient, [n]: white x, so E‖B_i∗x‖² = ‖B_i‖²; n_in the fan-in."""
        values = torch.ones(self.dimension)
        for o, row in enumerate(self.rows(values)):
            for block, _, basis in self._cells(o):
                energy = torch.as_tensor(np.square(basis.kernels).sum((1, 2, 3, 4)))
                scale = (2 / (self.fan_in * energy)).sqrt().to(row.dtype)
                row[:, block.start : block.stop] = scale.repeat(self.in_type.multiplicity(block.inp))
        return values

    # -- weight standardisation -------------------------------------------------------------------------------------

    def _register_standardisation(self, o: int) -> None:
        """The mean functionals of a row (orthonormal, [r, L]) and the Gram matrix of each block's kernels."""
        out = self.out_type.distinct[o]
        functionals = []
        for u in out.invariants().T:
            parts = []
            for block, _, basis in self._cells(o):
                inv = block.inp.invariants()
                ones = inv @ (inv.T @ np.ones(block.inp.size))
                mean = np.einsum("noiyx,o,i->n", basis.kernels, u, ones)
                parts.append(np.tile(mean, self.in_type.multiplicity(block.inp)))
            functionals.append(np.concatenate(parts))
        matrix = np.array(functionals).reshape(len(functionals), self._rows[o][1])
        if matrix.size:
            _, values, vectors = np.linalg.svd(matrix, full_matrices=False)
            matrix = vectors[values > 1e-9]
        self.register_constant(f"mean_{o}", matrix)
        for i, (_, _, basis) in enumerate(self._cells(o)):
            flat = basis.kernels.reshape(basis.dimension, int(np.prod(basis.kernels.shape[1:])))
            gram = flat @ flat.T
            scalar = basis.dimension == 0 or np.allclose(gram, gram[0, 0] * np.eye(len(gram)), atol=1e-9)
            stored = np.array(gram[0, 0] if basis.dimension else 1.0) if scalar else gram
            self.register_constant(f"gram_{o}_{i}", stored)

    def _gram(self, o: int, row: Tensor) -> Tensor:
        """The Gram matrix of the kernels, applied to rows [..., L]."""
        parts = []
        for i, (block, _, basis) in enumerate(self._cells(o)):
            gram = getattr(self, f"gram_{o}_{i}")
            part = row[..., block.start : block.stop]
            if gram.dim() == 0:
                parts.append(part * gram)
            else:
                parts.append((part.unflatten(-1, (-1, basis.dimension)) @ gram).flatten(-2))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _centre(self, o: int, row: Tensor) -> Tensor:
        """The rows without the part that gives the kernel a mean: P = 1 − AᵀA."""
        mean = getattr(self, f"mean_{o}")
        return row - (row @ mean.T) @ mean if mean.shape[0] else row

    def _deviation(self, o: int, centred: Tensor, eps: float) -> Tensor:
        """s per output field: ‖K‖²/d_out + ε·fan_in under the root, so that K/s has variance 1/fan_in per weight."""
        energy = (centred * self._gram(o, centred)).sum(-1, keepdim=True) / self.out_type.distinct[o].size
        return (energy + eps * self.fan_in).sqrt()

    def standardise(self, theta: Tensor, eps: float = 1e-8) -> Tensor:
        """θ̂: every output field's kernel with mean 0 and variance 1/fan_in, still in the span of the basis.

        The mean is taken over the invariant inputs (all channels of regular fields) and taps, and removed within the
        coefficients; the scale is one number per output field. Both commute with the group, so K(θ̂) is equivariant.
        """
        parts = []
        for o, row in enumerate(self.rows(theta)):
            centred = self._centre(o, row)
            parts.append((centred / self._deviation(o, centred, eps)).flatten(-2))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def standardise_vjp(self, theta: Tensor, gradient: Tensor, eps: float = 1e-8) -> Tensor:
        """Gradients [..., n] w.r.t. θ̂ → gradients [..., n] w.r.t. θ: P(v − Gθ̂·⟨v, θ̂⟩/d_out)/s for every row."""
        parts = []
        for o, (row, v) in enumerate(zip(self.rows(theta), self.rows(gradient))):
            centred = self._centre(o, row)
            deviation = self._deviation(o, centred, eps)
            unit = centred / deviation
            along = (v * unit).sum(-1, keepdim=True) / self.out_type.distinct[o].size
            parts.append((self._centre(o, v - self._gram(o, unit) * along) / deviation).flatten(-2))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
