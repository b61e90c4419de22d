"""Which rows of a data set are the same record, as far as that shows without reading them.

Rows are the same record if they are one row of one data set in the end, lie in the same memory, are the same file, or have the same
place in data sets that were made in the same way (class, folder, split) and may differ in their transforms.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

#: where data sets keep a list of their records
_LISTS = ("samples", "imgs", "images", "files", "paths", "data")
#: rows by which the contents of two data sets of one folder are compared
_COMPARED = 16
#: whose rows lie in memory
_MEMORY = -1


@dataclass(frozen=True)
class _Rows:
    """Of each row: the number of whatever it is a part of (below zero: of memory), and the interval that it is there."""

    whose: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @staticmethod
    def one(start: int, length: int) -> _Rows:
        return _Rows(np.array([_MEMORY]), np.array([start]), np.array([start + length]))

    def at(self, rows: np.ndarray) -> _Rows:
        return _Rows(self.whose[rows], self.start[rows], self.end[rows])


def is_joined(dataset: Any) -> bool:
    """Whether some record may be there several times, by the way the data set was put together."""
    inner = _wrapped(dataset)
    return isinstance(dataset, (Subset, ConcatDataset)) if inner is None else is_joined(inner)


def origins(dataset: Any) -> np.ndarray:
    """A number for each row; rows that are the same record have the same."""
    names: dict[Hashable, int] = {}
    rows = _origins(dataset, names)
    order = np.lexsort((rows.start, rows.whose))
    whose, start = rows.whose[order], rows.start[order]
    ends = rows.end[order]
    for one in np.unique(whose[whose < 0]):  # intervals of memory may differ in length: how far those up to here reach
        ends[whose == one] = np.maximum.accumulate(ends[whose == one])
    new = np.ones(len(order), dtype=bool)
    new[1:] = (whose[1:] != whose[:-1]) | (start[1:] >= ends[:-1])
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.cumsum(new)
    return found


def _origins(dataset: Any, names: dict[Hashable, int]) -> _Rows:
    inner = _wrapped(dataset)
    if inner is not None:
        return _origins(inner, names)
    if isinstance(dataset, Subset):
        return _origins(dataset.dataset, names).at(np.asarray([int(k) for k in dataset.indices], dtype=np.int64))
    if isinstance(dataset, ConcatDataset):
        return _joined([_origins(part, names) for part in dataset.datasets])
    return _leaf(dataset, names)


def _joined(parts: list[_Rows]) -> _Rows:
    return _Rows(*(np.concatenate([getattr(part, key) for part in parts]) for key in ("whose", "start", "end")))


def _wrapped(dataset: Any) -> Any:
    """The data set inside one that has a row for each of its rows (another transform, say); None if there is none."""
    if isinstance(dataset, (Subset, ConcatDataset)):
        return None
    inner = next(iter(_members(dataset)), None) if isinstance(dataset, StackDataset) else _attributes(dataset).get("dataset")
    try:
        return inner if isinstance(inner, Dataset) and len(inner) == len(dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def _members(dataset: StackDataset) -> Sequence[Any]:
    members: Any = dataset.datasets
    return list(members.values()) if isinstance(members, dict) else list(members)


def _leaf(dataset: Any, names: dict[Hashable, int]) -> _Rows:
    count = len(dataset)
    for name in _LISTS:
        entries = getattr(dataset, name, None)
        if isinstance(entries, (list, tuple)) and len(entries) == count > 0:
            listed = _listed(entries, names)
            if listed is not None:
                return listed
    found = [(value, block) for value in _values(dataset) if (block := _block(value)) is not None and block.shape[0] == count]
    value, widest = max(found, key=lambda pair: math.prod(pair[1].shape), default=(None, None))
    made = _made(dataset, count, value)
    if made is None and widest is not None:
        return widest.rows()
    return _in_order(count, id(dataset) if made is None else made, names)


def _in_order(count: int, name: Hashable, names: dict[Hashable, int]) -> _Rows:
    rows = np.arange(count)
    return _Rows(np.full(count, names.setdefault(name, len(names))), rows, rows + 1)


def _listed(entries: Sequence[Any], names: dict[Hashable, int]) -> _Rows | None:
    """[record, …] or [(record, label), …], where a record is a file, a tensor, or anything else but a number."""
    records = [entry[0] if isinstance(entry, (list, tuple)) and entry else entry for entry in entries]
    blocks = [_block(record) for record in records]
    if all(block is not None for block in blocks):
        return _joined([_Rows.one(block.start, block.bytes) for block in blocks if block is not None])
    if any(isinstance(record, (bool, int, float)) for record in records):
        return None
    if all(isinstance(record, (str, Path)) for record in records):
        if os.path.exists(records[0]):
            return _each([("file", os.path.abspath(record)) for record in records], names)
        # two may say the same word; data sets that say the same from the first to the last are one
        return _in_order(len(entries), hashlib.sha256(repr(entries).encode()).hexdigest(), names)
    return _each([("object", id(record)) for record in records], names)


def _each(entries: list[Hashable], names: dict[Hashable, int]) -> _Rows:
    """A file that one data set names several times has several records in it: its first is the first of another's."""
    seen: dict[Hashable, int] = {}
    place = np.empty(len(entries), dtype=np.int64)
    for row, entry in enumerate(entries):
        place[row] = seen[entry] = seen.get(entry, -1) + 1
    whose = np.asarray([names.setdefault(entry, len(names)) for entry in entries], dtype=np.int64)
    return _Rows(whose, place, place + 1)


def _values(dataset: Any) -> list[Any]:
    if isinstance(dataset, TensorDataset):
        return list(dataset.tensors)
    return list(_members(dataset)[:1] if isinstance(dataset, StackDataset) else _attributes(dataset).values())


def _attributes(dataset: Any) -> dict[str, Any]:
    return getattr(dataset, "__dict__", {})


def _made(dataset: Any, count: int, value: Any) -> Hashable | None:
    """How a data set of a folder was made, transforms apart, and what some of its rows hold (it may have been cut since)."""
    root = getattr(dataset, "root", None)
    if not isinstance(root, (str, Path)):
        return None
    plain = {k: v for k, v in _attributes(dataset).items() if isinstance(v, (bool, int, float, str)) and k != "root"}
    held = "" if value is None else str(value[:: max(1, count // _COMPARED)].tolist())
    return type(dataset), count, os.path.abspath(root), str(sorted(plain.items())), hashlib.sha256(held.encode()).hexdigest()


@dataclass(frozen=True)
class _Block:
    """Memory of rows: where it begins, its shape, and how many bytes lie between neighbours."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.itemsize + sum((size - 1) * abs(stride) for size, stride in zip(self.shape, self.strides))

    def rows(self) -> _Rows:
        """Where each row begins and ends. Rows that lie between each other's parts (columns of a matrix) are where they begin."""
        step, whose = self.strides[0], _MEMORY
        length = _Block(0, self.shape[1:], self.strides[1:], self.itemsize).bytes
        if step == 0:  # one row that is shown many times: as many records, at a place of their own
            step, length, whose = 1, 1, _MEMORY - 1 - self.start
        elif length > abs(step):
            length = self.itemsize
        start = self.start + step * np.arange(self.shape[0], dtype=np.int64)
        return _Rows(np.full(self.shape[0], whose, dtype=np.int64), start, start + length)


def _block(value: Any) -> _Block | None:
    """Of a tensor or an array that has memory to be seen."""
    if isinstance(value, Tensor):
        try:
            if not value.ndim or not value.numel() or value.layout is not torch.strided or not value.data_ptr():
                return None
            size = value.element_size()
            return _Block(value.data_ptr(), tuple(value.shape), tuple(size * s for s in value.stride()), size)
        except RuntimeError:  # of tensors without memory
            return None
    if isinstance(value, np.ndarray) and value.ndim and value.size and value.dtype != object:
        return _Block(value.__array_interface__["data"][0], value.shape, value.strides, value.itemsize)
    return None
