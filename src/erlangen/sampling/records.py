"""What a torch data loader says about its records before they are sampled privately: each is there once, and all are meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset


def refuse_sampler(loader: DataLoader) -> None:
    """Private batches are drawn from all records: a sampler that leaves some out, or favours some, would be passed over."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        raise ValueError(
            f"the data loader draws by a {type(sampler).__name__}, which private sampling replaces: every record of the data set "
            "would take part, whatever it leaves out or favours. Choose records with torch.utils.data.Subset(dataset, indices), "
            "and pass a loader without a sampler of its own"
        )


def refuse_repeats(dataset: Any, unit: Sequence[Any] | None) -> None:
    """A record that stands in the data set k times would add k clipped gradients: its copies must be one unit of privacy."""
    if not isinstance(dataset, (Subset, ConcatDataset)):
        return
    whose, place = _origins(dataset)
    _, first, of_row, counts = np.unique(
        np.stack([whose, place]), axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    of_row = of_row.reshape(-1)
    if unit is not None and len(unit) == len(of_row):
        _, labels = np.unique(np.asarray(unit), return_inverse=True)
        apart = labels.reshape(-1) != labels.reshape(-1)[first][of_row]
        if not apart.any():
            return
        row = int(apart.argmax())
    elif counts.max(initial=1) == 1:
        return
    else:
        row = int(first[counts.argmax()])
    raise ValueError(
        f"record {row} stands in the data set {int(counts[of_row[row]])} times (a Subset that repeats an index, or joined sets "
        "that overlap) and would add as many clipped gradients. Keep one of each, or give all its copies one label: unit=[…]"
    )


def _origins(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of every row: which data set it is from in the end, and its place there."""
    if isinstance(dataset, Subset):
        whose, place = _origins(dataset.dataset)
        rows = np.asarray([int(k) for k in dataset.indices], dtype=np.int64)
        return whose[rows], place[rows]
    if isinstance(dataset, ConcatDataset):
        parts = [_origins(part) for part in dataset.datasets]
        return np.concatenate([whose for whose, _ in parts]), np.concatenate([place for _, place in parts])
    return np.full(len(dataset), id(dataset), dtype=np.int64), np.arange(len(dataset))
