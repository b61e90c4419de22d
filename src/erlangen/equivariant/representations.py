"""Real orthogonal representations of the planar groups, as ρ(g) = Q (⊕ψ_k(g)) Qᵀ with irreducible ψ_k.

Real irreps. A rotation of frequency k acts by the 2×2 matrix R(kθ), and the reflection by diag(1, −1) before it. The
one-dimensional irreps are the trivial one, (−1)^f, and for even N those with the sign (−1)^r of the rotation index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from erlangen.equivariant.groups import Element, Group


@dataclass(frozen=True)
class Irrep:
    """The irrep of ``group`` with rotation frequency ``frequency``; ``parity`` 1 changes sign under the reflection.

    Two-dimensional irreps of groups with reflections have parity 1 (one component of the two changes sign).
    """

    group: Group
    parity: int
    frequency: int

    def __post_init__(self) -> None:
        n = self.group.rotations
        if self.frequency < 0 or (n is not None and 2 * self.frequency > n):
            raise ValueError(f"{self.group} has no irrep of frequency {self.frequency}; frequencies are 0 … N/2")
        if self.parity not in (0, 1) or (self.parity and not self.group.reflections):
            raise ValueError(f"{self.group} has no irrep of parity {self.parity}")
        if self.group.reflections and self.dim == 2 and self.parity == 0:
            raise ValueError(f"two-dimensional irreps of {self.group} have parity 1")

    @property
    def dim(self) -> int:
        return 1 if self.frequency == 0 or 2 * self.frequency == self.group.rotations else 2

    @property
    def is_trivial(self) -> bool:
        return self.frequency == 0 and self.parity == 0

    @property
    def copies_in_regular(self) -> int:
        """Multiplicity in the regular representation: d, or d/2 where ψ splits over the complex numbers."""
        return 2 if self.dim == 2 and self.group.reflections else 1

    @property
    def name(self) -> str:
        return f"ψ({self.parity},{self.frequency})" if self.group.reflections else f"ψ({self.frequency})"

    def matrix(self, g: Element) -> np.ndarray:
        c, s = math.cos(self.frequency * g.angle), math.sin(self.frequency * g.angle)
        if self.dim == 1:
            return np.array([[round(c) * (-1.0) ** (self.parity * g.flip)]])
        rotation = np.array([[c, -s], [s, c]])
        return rotation @ np.diag([1.0, -1.0]) if g.flip else rotation


@dataclass(frozen=True, eq=False)
class Representation:
    """ρ = Q (⊕ irreps) Qᵀ; ``permutation`` says that ρ permutes coordinates, so pointwise functions commute with it.

    Equality compares the group, the irreps and Q, so two ways of building the same representation are the same.
    """

    group: Group
    name: str
    irreps: tuple[Irrep, ...]
    change_of_basis: np.ndarray
    permutation: bool = False

    def __post_init__(self) -> None:
        size = sum(irrep.dim for irrep in self.irreps)
        if self.change_of_basis.shape != (size, size):
            shape = self.change_of_basis.shape
            raise ValueError(f"{self.name}: change of basis has shape {shape}, expected {(size, size)}")
        if not np.allclose(self.change_of_basis @ self.change_of_basis.T, np.eye(size), atol=1e-9):
            raise ValueError(f"{self.name}: the change of basis must be orthogonal")

    @property
    def size(self) -> int:
        return self.change_of_basis.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Representation):
            return NotImplemented
        if self is other:
            return True
        return (self.group, self.irreps) == (other.group, other.irreps) and np.allclose(
            self.change_of_basis, other.change_of_basis, atol=1e-9
        )

    def __hash__(self) -> int:
        return hash((self.group, self.irreps))

    def __deepcopy__(self, memo: dict[int, object]) -> Representation:
        return self  # immutable, and shared by all layers

    def __repr__(self) -> str:
        return f"{self.name}[{self.group}]"

    def irrep_columns(self) -> list[np.ndarray]:
        """The columns of Q that belong to each irrep, in order."""
        edges = np.cumsum([irrep.dim for irrep in self.irreps])[:-1]
        return np.split(self.change_of_basis, edges, axis=1)

    def matrix(self, g: Element) -> np.ndarray:
        """ρ(g)."""
        rho = np.zeros((self.size, self.size))
        for irrep, q in zip(self.irreps, self.irrep_columns()):
            rho += q @ irrep.matrix(g) @ q.T
        return np.round(rho) if self.permutation else rho

    def invariants(self) -> np.ndarray:
        """Orthonormal columns spanning the vectors that ρ leaves fixed (one per trivial irrep)."""
        columns = [q for irrep, q in zip(self.irreps, self.irrep_columns()) if irrep.is_trivial]
        return np.concatenate(columns, axis=1) if columns else np.zeros((self.size, 0))


def irreps_up_to(group: Group, frequency: int | None = None) -> list[Irrep]:
    """The irreps of ``group`` by frequency, then parity; all of them for a finite group when ``frequency`` is None."""
    if frequency is None:
        frequency = group.order and (group.rotations or 0) // 2
    found = []
    for k in range(frequency + 1):
        if group.rotations is not None and 2 * k > group.rotations:
            break
        one_dimensional = k == 0 or 2 * k == group.rotations
        parities = ((0, 1) if one_dimensional else (1,)) if group.reflections else (0,)
        found += [Irrep(group, parity, k) for parity in parities]
    return found


def irrep(group: Group, frequency: int, parity: int | None = None) -> Representation:
    """The irrep as a representation; by default the parity is 1 for two-dimensional irreps with reflections."""
    if parity is None:
        parity = int(group.reflections and frequency > 0 and 2 * frequency != group.rotations)
    psi = Irrep(group, parity, frequency)
    return Representation(group, psi.name, (psi,), np.eye(psi.dim), permutation=psi.is_trivial)


@cache
def trivial(group: Group) -> Representation:
    """The one-dimensional representation on which every element acts as 1 (scalar fields, images)."""
    return Representation(group, "trivial", (Irrep(group, 0, 0),), np.eye(1), permutation=True)


@cache
def regular(group: Group) -> Representation:
    """ρ(g) e_h = e_{gh}: one channel per group element, in the order of ``group.elements``."""
    irreps, rows = _fourier_rows(group.elements, irreps_up_to(group))
    return Representation(group, "regular", irreps, rows, permutation=True)


def _fourier_rows(elements: Sequence[Element], distinct: list[Irrep]) -> tuple[tuple[Irrep, ...], np.ndarray]:
    """Peter–Weyl rows √(d_ψ/|G|)·ψ(g)_{:,j}, for every copy j: ``rows @ f̂`` is the function on ``elements``."""
    irreps, columns = [], []
    for psi in distinct:
        matrices = np.stack([psi.matrix(g) for g in elements])
        for copy in range(psi.copies_in_regular):
            irreps.append(psi)
            columns.append(matrices[:, :, copy] * math.sqrt(psi.dim / len(elements)))
    return tuple(irreps), np.concatenate(columns, axis=1)


@cache
def quotient(group: Group, subgroup: Group) -> Representation:
    """The permutation of the left cosets of ``subgroup``: functions on G/H, of size |G|/|H|."""
    inside = group.subgroup_index(subgroup)
    cosets = sorted({tuple(sorted(int(group.table[g, h]) for h in inside)) for g in range(group.order)})
    indicator = np.zeros((group.order, len(cosets)))
    for column, coset in enumerate(cosets):
        indicator[list(coset), column] = 1 / math.sqrt(len(coset))
    irreps: list[Irrep] = []
    columns: list[np.ndarray] = []
    whole = regular(group)
    for psi in irreps_up_to(group):
        # The right-H-invariant part of each isotypic component, one copy at a time, kept if it is a new direction.
        copies = [q for other, q in zip(whole.irreps, whole.irrep_columns()) if other == psi]
        for part in _copies_inside(psi, copies, indicator):
            irreps.append(psi)
            columns.append(part)
    q = np.concatenate(columns, axis=1)
    return Representation(group, f"quotient({subgroup})", tuple(irreps), q, permutation=True)


def _copies_inside(psi: Irrep, copies: list[np.ndarray], indicator: np.ndarray) -> list[np.ndarray]:
    """Orthonormal copies of ψ among the columns of ``indicator``ᵀ·copy, each transforming exactly as ψ."""
    found: list[np.ndarray] = []
    for q in copies:
        part = indicator.T @ q
        for other in found:
            # Both intertwine with ψ; remove the component along every endomorphism of ψ.
            part = part - other @ _endomorphism(psi, other.T @ part)
        norm = np.linalg.norm(part) / math.sqrt(psi.dim)
        if norm > 1e-9:
            found.append(part / norm)
    return found


def _endomorphism(psi: Irrep, matrix: np.ndarray) -> np.ndarray:
    """Orthogonal projection of a matrix onto the ones that commute with ψ."""
    if psi.dim == 1:
        return matrix
    scalar = np.trace(matrix) / 2 * np.eye(2)
    if psi.group.reflections:
        return scalar
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    return scalar + np.sum(matrix * turn) / 2 * turn


def direct_sum(parts: Sequence[Representation], name: str | None = None) -> Representation:
    """ρ_1 ⊕ ρ_2 ⊕ … on one field."""
    if not parts or any(part.group != parts[0].group for part in parts):
        raise ValueError("a direct sum needs at least one representation, all of the same group")
    size = sum(part.size for part in parts)
    q, start = np.zeros((size, size)), 0
    for part in parts:
        q[start : start + part.size, start : start + part.size] = part.change_of_basis
        start += part.size
    irreps = tuple(psi for part in parts for psi in part.irreps)
    label = name or "⊕".join(part.name for part in parts)
    return Representation(parts[0].group, label, irreps, q, permutation=all(part.permutation for part in parts))


@cache
def spectral(group: Group, frequency: int) -> Representation:
    """The regular representation band-limited at ``frequency``: Fourier coefficients of functions on the group."""
    irreps = [psi for psi in irreps_up_to(group, frequency) for _ in range(psi.copies_in_regular)]
    size = sum(psi.dim for psi in irreps)
    return Representation(group, f"spectral({frequency})", tuple(irreps), np.eye(size), permutation=size == 1)


def fourier_matrix(group: Group, frequency: int, rotations: int) -> np.ndarray:
    """The matrix that samples a ``spectral(group, frequency)`` field on ``group.sample(rotations)``.

    Its columns are orthonormal when ``rotations > 2 * frequency``, so its transpose is the transform back.
    """
    if rotations <= 2 * frequency:
        raise ValueError(f"{rotations} rotations alias frequency {frequency}; use at least {2 * frequency + 1}")
    if group.rotations is not None and 2 * frequency >= group.rotations:
        raise ValueError(
            f"frequency is {frequency}, and half of {group}'s rotations or more: such a field has no values between the elements "
            f"of the group; use a frequency of at most {(group.rotations - 1) // 2}, or regular fields with Pointwise"
        )
    return _fourier_rows(group.sample(rotations), irreps_up_to(group, frequency))[1]


def restrict_irrep(psi: Irrep, subgroup: Group) -> tuple[tuple[Irrep, ...], np.ndarray]:
    """ψ as a representation of ``subgroup``: its irreps and the orthogonal Q with ψ(h) = Q (⊕) Qᵀ."""
    if not psi.group.contains(subgroup):
        raise ValueError(f"{subgroup} is not a subgroup of {psi.group}")
    n = subgroup.rotations
    k = psi.frequency if n is None else psi.frequency % n
    mirrored = n is not None and 2 * k > n
    if mirrored and n is not None:
        k = n - k
    one_dimensional = k == 0 or 2 * k == n
    parity = psi.parity if subgroup.reflections else 0
    if psi.dim == 1 or (not one_dimensional and not mirrored):
        return (Irrep(subgroup, parity, k),), np.eye(psi.dim)
    if one_dimensional:  # the components are even and odd under the reflection
        return (Irrep(subgroup, 0, k), Irrep(subgroup, parity, k)), np.eye(2)
    return (Irrep(subgroup, parity, k),), np.diag([1.0, -1.0])  # R(−kθ) = S R(kθ) S


@cache
def restrict(rho: Representation, subgroup: Group) -> Representation:
    """The same matrices ρ(h), for h in ``subgroup`` only."""
    irreps: list[Irrep] = []
    columns = []
    for psi, q in zip(rho.irreps, rho.irrep_columns()):
        parts, change = restrict_irrep(psi, subgroup)
        irreps += parts
        columns.append(q @ change)
    q = np.concatenate(columns, axis=1)
    permutation = rho.permutation or all(psi.is_trivial for psi in irreps)
    return Representation(subgroup, f"{rho.name}|{subgroup}", tuple(irreps), q, permutation=permutation)
