"""Which record is where, as far as it can be told without reading them all: for processes that must have them in one order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from erlangen.sampling.records import LOOKED_AT, seeded


def order_of(dataset: Any, read: bool = True, within: tuple[Any, ...] = ()) -> str:
    """Indices of subsets, tensors in memory; with ``read`` also what other data sets keep of every record (lists of files and of
    labels, arrays), and a few of their records (one that shuffles its files for itself has another order in every process)."""
    if isinstance(dataset, Subset):
        indices = torch.as_tensor([int(k) for k in dataset.indices], dtype=torch.int64)
        return f"{_digest(indices)} of {order_of(dataset.dataset, read, within)}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(order_of(part, read, within) for part in dataset.datasets)
    if isinstance(dataset, TensorDataset):
        return f"{len(dataset)} {[_digest(t) for t in dataset.tensors if t.layout is torch.strided]}"
    kept = [*_kept(dataset, within)] if read else []
    seen = _looked_at(dataset) if read and not within else ""  # who holds it reads it
    return f"{len(dataset)} {type(dataset).__name__} {kept} {seen}"


def _kept(dataset: Any, within: tuple[Any, ...] = ()) -> Iterator[str]:
    """Of data sets inside, and of attributes with an entry for each record. Arrays on disk are not read."""
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            with suppress(TypeError, NotImplementedError):  # of those without a length
                if not any(value is outer for outer in (dataset, *within)):
                    yield f"{name}: {order_of(value, True, (dataset, *within))}"
        elif isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim):
            yield f"{name}: {_entries(value) if len(value) == len(dataset) else ''}"


def _entries(value: Any) -> str:
    """Of an array, or of a list of names and numbers; empty for anything else. Folders may be others on other machines."""
    if isinstance(value, Tensor):
        return _digest(value) if value.layout is torch.strided else ""
    if isinstance(value, np.ndarray):
        there = not isinstance(value, np.memmap) and not value.dtype.hasobject
        return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest() if there else ""
    leaves = [str(leaf) if isinstance(leaf, PurePath) else leaf for leaf in tree_leaves(value)]
    if not all(isinstance(leaf, (str, bytes, int, float)) for leaf in leaves):
        return ""
    folder = len(os.path.commonprefix([leaf for leaf in leaves if isinstance(leaf, str)]))  # noqa: RUF071 (by characters)
    return hashlib.sha256(repr([leaf[folder:] if isinstance(leaf, str) else leaf for leaf in leaves]).encode()).hexdigest()


def _looked_at(dataset: Any) -> str:
    """Of records here and there; empty where they cannot be read, or are not the same when they are read again."""
    seen = min(LOOKED_AT, len(dataset))
    places = [k * len(dataset) // seen for k in range(seen)]

    def read() -> str:
        with seeded(0):  # augmented alike everywhere
            leaves = tree_leaves([dataset[place] for place in places])
        held = [_digest(torch.as_tensor(t)) if isinstance(t, (Tensor, np.ndarray)) else _value(t) for t in leaves]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    try:
        first, again = read(), read()
    except Exception:  # the loop will tell
        return ""
    return first if first == again else ""


def _value(leaf: Any) -> Any:
    """Of a record's part that is no array: itself, or the bytes of an image."""
    if isinstance(leaf, (str, bytes, int, float, bool, type(None))):
        return leaf
    return leaf.tobytes() if hasattr(leaf, "tobytes") else type(leaf).__name__


def _digest(t: Tensor) -> str:
    """Of the bits of a tensor in their order, a part at a time."""
    found = hashlib.sha256()
    for part in t.detach().reshape(-1).split(1 << 22):
        found.update(part.cpu().view(torch.uint8).numpy())
    return found.hexdigest()
