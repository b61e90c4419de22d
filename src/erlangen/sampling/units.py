"""The unit of privacy: one record, or all records that share a label (a patient's images)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.workers import Workers


class Units:
    """Units 0…n−1 and the rows of the data set that belong to each."""

    def __init__(self, rows: int, labels: Sequence[Any] | np.ndarray | None = None, name: str = "record") -> None:
        self.rows, self.name = rows, name
        if labels is None:
            self.count, self._of_row, self._order, self._start = rows, None, None, None
            return
        refuse_missing(labels)
        array = np.asarray(labels)
        if array.ndim == 1:
            refuse_merged(labels, array)
        if len(labels) != rows:
            raise ValueError(f"unit has {len(labels)} labels for {rows} records: give one label per record")
        if array.ndim != 1:
            raise ValueError(f"unit has shape {array.shape} for {rows} records: give one label per record")
        _, of_row = np.unique(array, return_inverse=True)
        self._of_row = torch.from_numpy(of_row.reshape(-1).astype(np.int64))
        self.count = int(self._of_row.max()) + 1 if rows else 0
        self._order = torch.argsort(self._of_row, stable=True)
        counts = torch.bincount(self._of_row, minlength=self.count)
        self._start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])

    @property
    def grouped(self) -> bool:
        return self._of_row is not None

    def digest(self) -> str:
        """Equal exactly if the same rows belong together."""
        return hashlib.sha256(b"" if self._of_row is None else self._of_row.numpy().tobytes()).hexdigest()

    def grouping(self) -> str:
        """As `digest`, whatever the labels are: they may be spelt otherwise, or be different for every record."""
        if self._of_row is None or self.count == self.rows:
            return hashlib.sha256(b"").hexdigest()
        of_row = self._of_row.numpy()
        _, first, number = np.unique(of_row, return_index=True, return_inverse=True)
        return hashlib.sha256(first[number.reshape(-1)].astype(np.int64).tobytes()).hexdigest()

    def rows_of(self, units: Tensor) -> list[Tensor]:
        """The rows of each of these units."""
        if self._order is None or self._start is None:
            return list(units[:, None])
        return [self._order[self._start[u] : self._start[u + 1]] for u in units.tolist()]

    def physical(self, units: Tensor, limit: int | None, padded: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Physical batches (rows, owner of each row) of at most ``limit`` rows; a unit is never split.

        With ``padded`` every batch has exactly ``limit`` rows (a unit with more rows than that, the next multiple): row 0
        stands in where there is none, its owner is −1 and it contributes nothing.
        """
        if padded and not limit:
            raise ValueError("padding needs the number of rows to pad to: give limit")
        parts = self._cut(units, limit)
        return [_filled(rows, owner, limit) for rows, owner in parts] if padded and limit else parts

    def _cut(self, units: Tensor, limit: int | None) -> list[tuple[Tensor, Tensor]]:
        if not self.grouped:
            parts = units.split(limit) if limit and len(units) else (units,)
            return [(part, part) for part in parts]
        batches: list[list[tuple[Tensor, int]]] = [[]]
        size = 0
        for unit, rows in zip(units.tolist(), self.rows_of(units), strict=True):
            if limit and size and size + len(rows) > limit:
                batches.append([])
                size = 0
            batches[-1].append((rows, unit))
            size += len(rows)
        return [_join(batch) for batch in batches]

    def share(self, units: Tensor, limit: int | None, workers: Workers, padded: bool = False) -> Share:
        """What this worker does of a logical batch. Each unit, with all its rows, is one worker's; some may get none.

        All workers get equally many physical batches, so that they stay in step. Where nobody is left for one, row 0 stands in, and
        belongs to nobody: modules and losses need not know what a batch of no rows is (x.view(len(x), -1) has no answer there).
        """
        ends = self._ends(units, workers.count)
        start = int(ends[workers.rank])
        sizes = self._sizes(units)
        total, before = int(sizes.sum()), int(sizes[:start].sum())
        cut = lambda k: self.physical(units[int(ends[k]) : int(ends[k + 1])], limit, padded)  # noqa: E731
        parts = cut(workers.rank)
        longest = max(len(cut(k)) for k in range(workers.count)) if limit and not workers.alone else len(parts)
        parts += self.physical(units[:0], limit, padded) * (longest - len(parts))
        return Share([part if len(part[0]) else _filled(*part, 1) for part in parts], before, total)

    def _sizes(self, units: Tensor) -> Tensor:
        """How many rows each of these units has."""
        return torch.ones(len(units), dtype=torch.long) if self._start is None else self._start.diff()[units]

    def _ends(self, units: Tensor, count: int) -> Tensor:
        """Where to cut a batch so that each of ``count`` consecutive parts has about as many rows."""
        rows = torch.cat([torch.zeros(1, dtype=torch.long), self._sizes(units).cumsum(0)])
        wanted = torch.tensor([int(rows[-1]) * k // count for k in range(count + 1)])
        return torch.searchsorted(rows, wanted)


def refuse_missing(labels: Sequence[Any] | np.ndarray) -> None:
    """Records of nobody would be one unit together, in which each could turn the others' gradient around."""
    array = labels if isinstance(labels, np.ndarray) else np.asarray(labels)
    if array.dtype.kind in "fmM":
        missing = np.isnan(array) if array.dtype.kind == "f" else np.isnat(array)
    elif array.dtype.kind in "OUS":  # one by one: numpy writes NaN as text where the others are text
        missing = np.array([_is_missing(value) for value in labels], dtype=bool)
    else:
        return
    if missing.any():
        row = int(missing.reshape(len(missing), -1).any(1).argmax())
        raise ValueError(f"unit has no value ({str(labels[row])!r}) for record {row}: give every record an id")


def refuse_merged(labels: Sequence[Any] | np.ndarray, array: np.ndarray) -> None:
    """One array has one type: of whole numbers beside a fraction it keeps 53 bits, and 1 beside text is "1". Units that become one
    by that are promised nothing each."""
    if isinstance(labels, (np.ndarray, torch.Tensor)):
        return
    values = [_plain(value) for value in labels]
    kinds = {isinstance(value, (str, bytes)) for value in values}
    if len(kinds) > 1 or (array.dtype.kind == "f" and len(set(values)) != len(np.unique(array))):
        found = sorted({type(value).__name__ for value in values})
        raise ValueError(
            f"unit holds labels of several kinds ({', '.join(found)}), or whole numbers too long to be told apart beside the "
            "others: write all of them as text, unit=[str(label) for label in labels]"
        )


def _is_missing(value: Any) -> bool:
    try:
        return bool(value is None or value != value or value == "" or value == b"")
    except TypeError:  # of values that are not known to be anything
        return True
    except ValueError:  # of several numbers for one record: their shape is refused
        return False


@dataclass(frozen=True)
class Share:
    """One worker's part of a logical batch: its physical batches, and where its rows lie among the rows of all."""

    parts: list[tuple[Tensor, Tensor]]
    start: int
    total: int


def _filled(rows: Tensor, owner: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    missing = limit * max(1, -(-len(rows) // limit)) - len(rows)
    return F.pad(rows, (0, missing)), F.pad(owner, (0, missing), value=-1)


def _join(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    if not batch:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    rows = torch.cat([rows for rows, _ in batch])
    owner = torch.cat([torch.full((len(rows),), unit) for rows, unit in batch])
    return rows, owner


def unit_labels(dataset: Any, unit: str | Sequence[Any] | None) -> Sequence[Any] | None:
    """Labels from a sequence, an attribute of the data set, or a key of its (mapping) samples."""
    if unit is None or not isinstance(unit, str):
        found = unit
    elif hasattr(dataset, unit):
        found = list(getattr(dataset, unit))
    elif len(dataset) and isinstance(dataset[0], dict) and unit in dataset[0]:
        found = [_plain(dataset[i][unit]) for i in range(len(dataset))]
    else:
        raise _unknown(dataset, unit)
    if found is not None:
        refuse_missing(found)
    return found


def require_units(dataset: Any, attribute: str, before: Units) -> None:
    """Records belong to the units to which they belonged when sampling was made private: a data set that shuffles itself takes the
    labels along, and a unit's records would be clipped as those of as many others."""
    if Units(len(dataset), unit_labels(dataset, attribute)).grouping() != before.grouping():
        raise RuntimeError(
            f"{attribute!r} of the data set, which says whose each record is, is another one than when it was made private (it was "
            "shuffled, or filled anew). Leave records where they are: private sampling draws them in no order. Or call "
            "engine.remove() and make_private again"
        )


def _unknown(dataset: Any, unit: str) -> ValueError:
    return ValueError(
        f"unit={unit!r} is neither an attribute of {type(dataset).__name__} nor a key of its samples; "
        "pass a sequence with one label per record"
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
