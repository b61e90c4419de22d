"""Field types: how the channels of a feature map transform, as an ordered list of representations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from erlangen.equivariant.groups import Element, Group
from erlangen.equivariant.representations import Representation, regular, restrict, trivial


@dataclass(frozen=True)
class FieldType:
    """Channels stacked field after field; field f transforms by ``representations[f]``."""

    group: Group
    representations: tuple[Representation, ...]

    def __post_init__(self) -> None:
        if not self.representations:
            raise ValueError("a field type needs at least one field")
        for rho in self.representations:
            if rho.group != self.group:
                raise ValueError(f"{rho} is a representation of {rho.group}, not of {self.group}; restrict it first")

    @cached_property
    def size(self) -> int:
        """Number of channels."""
        return sum(rho.size for rho in self.representations)

    @cached_property
    def starts(self) -> np.ndarray:
        """First channel of each field."""
        return np.cumsum([0] + [rho.size for rho in self.representations[:-1]])

    @cached_property
    def distinct(self) -> tuple[Representation, ...]:
        """The different representations, in order of first appearance."""
        return tuple(dict.fromkeys(self.representations))

    def __deepcopy__(self, memo: dict[int, object]) -> FieldType:
        return self  # immutable

    def __len__(self) -> int:
        return len(self.representations)

    def __add__(self, other: FieldType) -> FieldType:
        return FieldType(self.group, self.representations + other.representations)

    def __repr__(self) -> str:
        counts = [f"{self.multiplicity(rho)}×{rho.name}" for rho in self.distinct]
        return f"FieldType({self.group}: {' + '.join(counts)})"

    def multiplicity(self, rho: Representation) -> int:
        return sum(other == rho for other in self.representations)

    def channels_of(self, rho: Representation) -> np.ndarray:
        """Channels of all fields of type ``rho``, as [multiplicity, size]."""
        starts = [s for s, other in zip(self.starts, self.representations) if other == rho]
        return np.array(starts)[:, None] + np.arange(rho.size)[None]

    @cached_property
    def field_of_channel(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), [rho.size for rho in self.representations])

    @property
    def is_uniform(self) -> bool:
        return len(self.distinct) == 1

    def uniform(self, purpose: str) -> Representation:
        """The one representation of all fields, or an error that names what needed it."""
        if not self.is_uniform:
            raise ValueError(f"{purpose} needs fields of one kind, got {self}; split the type or use another layer")
        return self.distinct[0]

    def matrix(self, g: Element) -> np.ndarray:
        """The action of g on one pixel's channels."""
        rho = np.zeros((self.size, self.size))
        for start, field in zip(self.starts, self.representations):
            rho[start : start + field.size, start : start + field.size] = field.matrix(g)
        return rho

    def invariants(self) -> np.ndarray:
        """[channels, number of trivial irreps]: the unit vectors that the group leaves fixed, field by field."""
        columns = []
        for start, field in zip(self.starts, self.representations):
            for vector in field.invariants().T:
                column = np.zeros(self.size)
                column[start : start + field.size] = vector
                columns.append(column)
        return np.stack(columns, 1) if columns else np.zeros((self.size, 0))

    def restrict(self, subgroup: Group) -> FieldType:
        """The same channels, under a smaller group."""
        return FieldType(subgroup, tuple(restrict(rho, subgroup) for rho in self.representations))


def fields(rho: Representation | Sequence[Representation], count: int = 1) -> FieldType:
    """``count`` copies of the given representation(s)."""
    parts = (rho,) if isinstance(rho, Representation) else tuple(rho)
    if not parts:
        raise ValueError("a type needs at least one representation, and was given none")
    return FieldType(parts[0].group, parts * count)


def regular_fields(group: Group, count: int) -> FieldType:
    """``count`` regular fields: count·|G| channels."""
    return fields(regular(group), count)


def trivial_fields(group: Group, count: int) -> FieldType:
    """``count`` scalar fields, such as the colours of an image."""
    return fields(trivial(group), count)
