"""Bases of equivariant kernels between two representations, sampled on the taps of a convolution.

Two bases span equivariant kernels:

* ``steerable``: harmonics on Gaussian rings between every pair of irreps, carried to the representations by their
  change of basis. Any group, band-limited.
* ``pixel``: for permutation representations of a group that preserves the pixel grid, the indicator functions of the
  orbits of (out, in, tap). Every exactly equivariant kernel, and a gather instead of a matrix product: for regular
  fields it is the group convolution itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from erlangen.equivariant.groups import Element
from erlangen.equivariant.kernels import KernelElement, KernelGrid, irrep_kernels
from erlangen.equivariant.representations import Irrep, Representation


@dataclass(frozen=True, eq=False)
class BasisLabel:
    """From which irrep to which (by position) a basis element leads, and its harmonic."""

    in_irrep: Irrep | None
    out_position: int
    element: KernelElement | None


@dataclass(frozen=True, eq=False)
class Orbits:
    """Orbits of the group on the entries (out, in, tap) of a kernel between permutation representations.

    ``entry`` gives the orbit of every entry, [d_out·d_in·k·k]; ``scale`` the value of a normalised indicator on it.
    """

    entry: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True, eq=False)
class KernelBasis:
    """Kernels [n, d_out, d_in, k, k], each with ‖B‖² = (dimension of the output it reaches).

    Where ``orbits`` is there, every kernel is constant on orbits: B_b = Σ_p mix[p, b]·(indicator of orbit p).
    """

    kernels: np.ndarray
    labels: tuple[BasisLabel, ...]
    orbits: Orbits | None
    mix: np.ndarray | None

    @property
    def dimension(self) -> int:
        return self.kernels.shape[0]

    def __deepcopy__(self, memo: dict[int, object]) -> KernelBasis:
        """Immutable and shared by all layers of the same types: copies of a network do not copy it."""
        return self


@cache
def steerable_basis(inp: Representation, out: Representation, grid: KernelGrid) -> KernelBasis:
    """Harmonics on rings between all pairs of irreps of the two representations."""
    kernels, labels = [], []
    for o, (psi_out, q_out) in enumerate(zip(out.irreps, out.irrep_columns())):
        for psi_in, q_in in zip(inp.irreps, inp.irrep_columns()):
            sampled, elements = irrep_kernels(psi_in, psi_out, grid)
            carried = q_out @ sampled.transpose(0, 3, 4, 1, 2) @ q_in.T  # [n, k, k, out, in]
            kernels.append(carried.transpose(0, 3, 4, 1, 2))
            labels += [BasisLabel(psi_in, o, element) for element in elements]
    stacked = np.concatenate(kernels)
    orbits = kernel_orbits(inp, out, grid.size) if _has_orbits(inp, out) else None
    mix = None
    if orbits is not None:
        first = np.unique(orbits.entry, return_index=True)[1]
        mix = stacked.reshape(len(stacked), orbits.entry.size)[:, first].T.copy()
    return KernelBasis(stacked, tuple(labels), orbits, mix)


@cache
def pixel_basis(inp: Representation, out: Representation, size: int) -> KernelBasis:
    """Every exactly equivariant kernel, by orbits; permutation representations of C_1, C_2, C_4, D_1, D_2, D_4 only."""
    if not _has_orbits(inp, out):
        raise ValueError(
            f"basis 'pixel' needs permutation representations of a group that preserves the grid, got {inp} → {out}; "
            "use basis='steerable'"
        )
    orbits = kernel_orbits(inp, out, size)
    count = len(orbits.scale)
    kernels = np.zeros((count, orbits.entry.size))
    kernels[orbits.entry, np.arange(orbits.entry.size)] = orbits.scale[orbits.entry]
    labels = tuple(BasisLabel(None, 0, None) for _ in range(count))
    return KernelBasis(kernels.reshape(count, out.size, inp.size, size, size), labels, orbits, np.diag(orbits.scale))


def _has_orbits(inp: Representation, out: Representation) -> bool:
    return inp.group.is_grid_symmetry and inp.permutation and out.permutation


def tap_permutation(g: Element, size: int) -> np.ndarray:
    """p with (tap p[t] of the kernel) = g·(tap t); exact for quarter turns and reflections."""
    taps = np.arange(size * size).reshape(size, size)
    turns = g.quarter_turns()
    if turns is None:
        raise ValueError(f"a rotation by {math.degrees(g.angle):.3g}° does not map pixels to pixels")
    # An image moved by g has at g·t what it had at t; the moved index image therefore lists g⁻¹ at each place.
    moved = np.rot90(taps[:, ::-1] if g.flip else taps, turns).reshape(-1)
    return np.argsort(moved)


@cache
def kernel_orbits(inp: Representation, out: Representation, size: int) -> Orbits:
    """Orbits of (a, b, t) → (ρ_out(g) a, ρ_in(g) b, g t), numbered by their smallest entry."""
    taps = size * size
    index = np.arange(out.size * inp.size * taps)
    a, b, t = np.unravel_index(index, (out.size, inp.size, taps))
    smallest = index.copy()
    for g in inp.group.elements:
        move_out, move_in = np.argmax(out.matrix(g), axis=0), np.argmax(inp.matrix(g), axis=0)
        image = np.ravel_multi_index((move_out[a], move_in[b], tap_permutation(g, size)[t]), (out.size, inp.size, taps))
        smallest = np.minimum(smallest, image)
    _, entry, counts = np.unique(smallest, return_inverse=True, return_counts=True)
    return Orbits(entry.reshape(-1), np.sqrt(out.size / counts))
