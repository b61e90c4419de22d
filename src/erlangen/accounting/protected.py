"""Whom a release protects: releases that protect different units do not add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .events import EventError

#: what units are called whose labels came without a name: on other records they may be anybody's
NAMELESS = "group"
#: what is protected where nobody says whose records are whose: as the name of a group it would promise to each record what
#: holds for all of a group's together
_RECORDS = ("record", "records")


def require_name(unit: str) -> None:
    """Groups of records are not called records: one record can move its group's clipped gradient by two bounds."""
    if unit.strip().casefold() in _RECORDS:
        raise ValueError(
            f"unit is {unit!r}, which is what is protected without units: groups of that name would promise to each record what "
            "holds for a group as a whole. Call them what they are (patient, say), or leave unit out"
        )


@dataclass(frozen=True)
class Protected:
    """``unit``: what one is called. ``grouping``: a digest of who belongs together. ``data``: one of which records there are."""

    unit: str
    grouping: str
    data: str

    def agrees(self, other: Protected) -> bool:
        """On the same records units are who belongs together, whatever they are called; on others only names can be compared."""
        if self.data == other.data:
            return self.grouping == other.grouping
        return self.unit == other.unit != NAMELESS

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def from_json(obj: Any) -> Protected:
        keys = ("unit", "grouping", "data")
        if not isinstance(obj, Mapping) or any(not isinstance(obj.get(key), str) for key in keys):
            raise EventError(f"whom a release protects is said by {', '.join(keys)}; found {str(obj)[:60]!r}")
        return Protected(*(obj[key] for key in keys))


def mixed(everybody: Iterable[Protected]) -> str | None:
    """Why releases that protect these do not add up; None if they do."""
    found = list(everybody)
    for k, one in enumerate(found):
        other = next((p for p in found[:k] if not p.agrees(one)), None)
        if other is None:
            continue
        if one.unit == other.unit == NAMELESS and one.data != other.data:
            return (
                "releases on different data protect groups without a name, and whether one is part of another cannot be known. Say "
                "what they are (unit={'patient': labels}), or train each on an engine (accountant) of its own"
            )
        same = one.unit == other.unit
        units = f"the same records, put together into other units ({one.unit})" if same else f"a {other.unit}, then a {one.unit}"
        return (
            f"releases protect {units}: what they promise to a unit they do not promise to a part of it, nor to several together. "
            "Train each on an engine (accountant) of its own: each ε then holds for its own unit"
        )
    return None
