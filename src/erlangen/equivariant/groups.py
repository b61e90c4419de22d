"""The planar point groups C_N, D_N, SO(2) and O(2), acting on the plane about the origin.

An element is g = r(θ) s^f: first the reflection s (if f = 1), then the anticlockwise rotation by θ. The reflection s
swaps left and right (its axis is the vertical one, at angle π/2), so that on images s is a horizontal flip and
r(π/2) is ``torch.rot90(x, 1, (-2, -1))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

REFLECTION_AXIS = math.pi / 2
"""Angle of the line that the reflection s leaves fixed."""


class Element(NamedTuple):
    """The transformation r(angle) s^flip; the angle is in radians, anticlockwise."""

    flip: int
    angle: float

    def matrix(self) -> np.ndarray:
        """The 2×2 matrix of the element on coordinates (x to the right, y upwards)."""
        c, s = math.cos(self.angle), math.sin(self.angle)
        rotation = np.array([[c, -s], [s, c]])
        return rotation @ np.diag([-1.0, 1.0]) if self.flip else rotation

    def quarter_turns(self) -> int | None:
        """How many quarter turns the rotation is, or None if it is not on the pixel grid."""
        turns = self.angle / (math.pi / 2)
        return round(turns) % 4 if abs(turns - round(turns)) < 1e-9 else None

    def __matmul__(self, other: Element) -> Element:
        sign = -1.0 if self.flip else 1.0
        return Element(self.flip ^ other.flip, math.remainder(self.angle + sign * other.angle, 2 * math.pi))

    def inverse(self) -> Element:
        return Element(self.flip, self.angle if self.flip else -self.angle)


@dataclass(frozen=True)
class Group:
    """A subgroup of O(2): rotations of order ``rotations`` (None: all of them), with or without ``reflections``."""

    rotations: int | None
    reflections: bool

    def __post_init__(self) -> None:
        if self.rotations is not None and self.rotations < 1:
            raise ValueError(f"a group needs at least one rotation, got {self.rotations}; C_1 is the trivial group")

    @property
    def name(self) -> str:
        if self.rotations is None:
            return "O(2)" if self.reflections else "SO(2)"
        return f"{'D' if self.reflections else 'C'}{self.rotations}"

    def __str__(self) -> str:
        return self.name

    @property
    def is_finite(self) -> bool:
        return self.rotations is not None

    @property
    def order(self) -> int:
        """Number of elements; an error for SO(2) and O(2)."""
        if self.rotations is None:
            raise ValueError(f"{self.name} has infinitely many elements; use a finite group or irreducible fields")
        return self.rotations * (2 if self.reflections else 1)

    @property
    def is_grid_symmetry(self) -> bool:
        """Whether every element maps the pixel grid onto itself (C_1, C_2, C_4, D_1, D_2, D_4)."""
        return self.rotations in (1, 2, 4)

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        """All elements, the identity first: rotations by increasing angle, then reflections followed by rotations."""
        return tuple(self.sample(self.rotations)) if self.order else ()

    def sample(self, rotations: int | None = None) -> list[Element]:
        """The elements with ``rotations`` equally spaced angles: a finite subgroup, or the group itself if finite."""
        n = rotations if rotations is not None else self.rotations
        if n is None:
            raise ValueError(f"{self.name} needs a number of rotations to be sampled, for example sample(16)")
        return [Element(f, 2 * math.pi * k / n) for f in range(2 if self.reflections else 1) for k in range(n)]

    @cached_property
    def table(self) -> np.ndarray:
        """Multiplication table: ``elements[table[a, b]] == elements[a] @ elements[b]``."""
        n, order = self.rotations or 0, self.order
        flips, turns = np.divmod(np.arange(order), n)
        sign = np.where(flips == 1, -1, 1)
        return (flips[:, None] ^ flips[None]) * n + (turns[:, None] + sign[:, None] * turns[None]) % n

    @cached_property
    def inverses(self) -> np.ndarray:
        """``elements[inverses[a]]`` is the inverse of ``elements[a]``."""
        return np.argmax(self.table == 0, axis=1)

    def contains(self, subgroup: Group) -> bool:
        """Whether ``subgroup`` (with the same reflection axis) lies inside this group."""
        if subgroup.reflections and not self.reflections:
            return False
        if self.rotations is None:
            return True
        return subgroup.rotations is not None and self.rotations % subgroup.rotations == 0

    def subgroup_index(self, subgroup: Group) -> np.ndarray:
        """Positions in ``elements`` of the elements of ``subgroup``, in the subgroup's own order."""
        if not self.contains(subgroup):
            raise ValueError(f"{subgroup} is not a subgroup of {self}; its rotations must divide {self.rotations}")
        n, step = self.rotations or 0, (self.rotations or 0) // (subgroup.rotations or 1)
        flips, turns = np.divmod(np.arange(subgroup.order), subgroup.rotations or 1)
        return flips * n + turns * step

    def half(self) -> Group:
        """The subgroup of half order with half the rotations (C_2N → C_N, D_2N → D_N); SO(2) and O(2) → C_1."""
        if self.rotations is None:
            return Group(1, False)
        if self.rotations % 2:
            raise ValueError(
                f"{self.name} has an odd number of rotations and no half with the same reflections; choose an even number, or "
                "give the network restriction=False"
            )
        return Group(self.rotations // 2, self.reflections)


def cyclic(n: int) -> Group:
    """C_n: rotations by multiples of 2π/n."""
    return Group(n, False)


def dihedral(n: int) -> Group:
    """D_n: the rotations of C_n and the reflections across n axes; 2n elements."""
    return Group(n, True)


def so2() -> Group:
    """SO(2): all rotations."""
    return Group(None, False)


def o2() -> Group:
    """O(2): all rotations and reflections."""
    return Group(None, True)


@cache
def group_by_name(name: str) -> Group:
    """The group called ``name``: "C8", "D4", "SO(2)", "so2", "O(2)"."""
    key = name.replace("(", "").replace(")", "").replace("_", "").upper()
    if key in ("SO2", "O2"):
        return Group(None, key == "O2")
    if key[:1] in ("C", "D") and key[1:].isdigit():
        return Group(int(key[1:]), key[0] == "D")
    raise ValueError(f"unknown group {name!r}; use C<N>, D<N>, SO(2) or O(2)")
