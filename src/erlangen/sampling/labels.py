"""Records without a label, as far as they show: what a loss makes of them is for an experiment to tell."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

from erlangen.gradients.losses import UNUSED

#: where data sets keep their labels, and how many records are looked at where they do not
_LABELS, _LOOKED_AT = ("targets", "labels", "y"), 16


def unlabelled(dataset: Any) -> int | None:
    """A record whose label is `UNUSED`, if one is found: losses leave it out, and a mean may divide by how many are left."""
    if isinstance(dataset, Subset):
        inner: Any = dataset.dataset
        columns = [column[np.asarray([int(k) for k in dataset.indices])] for column in _columns(inner)]
    else:
        columns = _columns(dataset)
    for column in columns:
        if (column == UNUSED).any():
            return int((column == UNUSED).argmax())
    if columns:
        return None
    count = min(_LOOKED_AT, len(dataset))
    return next((k for k in (i * len(dataset) // count for i in range(count)) if _is_unused(dataset[k])), None)


def _columns(dataset: Any) -> list[np.ndarray]:
    """One whole number for each record, as far as they lie in memory."""
    held = dataset.tensors if isinstance(dataset, TensorDataset) else [getattr(dataset, name, None) for name in _LABELS]
    lists = [np.asarray(t) for t in held if isinstance(t, list) and all(isinstance(k, (int, np.integer)) for k in t)]
    whole = [t.cpu().numpy() for t in held if isinstance(t, Tensor) and not (t.is_floating_point() or t.is_complex())]
    arrays = [t for t in held if isinstance(t, np.ndarray)]
    return [t for t in (*lists, *whole, *arrays) if t.shape == (len(dataset),) and t.dtype.kind == "i"]


def _is_unused(record: Any) -> bool:
    numbers = (t.item() if isinstance(t, Tensor) and not t.ndim else t for t in tree_leaves(record))
    return any(isinstance(t, (int, np.integer)) and t == UNUSED for t in numbers)
