"""What a torch data loader says about its records before they are sampled privately: each is there once, and all are meant."""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from erlangen.sampling.origins import is_joined, origins


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
    if not is_joined(dataset):
        return
    _, first, of_row, counts = np.unique(origins(dataset), return_index=True, return_inverse=True, return_counts=True)
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
        "that overlap, perhaps under other transforms) and would add as many clipped gradients. Keep one of each, or give all its "
        "copies one label: unit=[…]"
    )


def layout_of(dataset: Any) -> Any:
    """Which records a data set has, as far as indices and lengths say it."""
    if isinstance(dataset, Subset):
        rows = np.asarray([int(k) for k in dataset.indices], dtype=np.int64)
        return hashlib.sha256(rows.tobytes()).hexdigest(), layout_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return tuple(map(layout_of, dataset.datasets))
    return len(dataset)


def digest_of(dataset: Any) -> str:
    """Of the layout; equal in every process. Nothing is read for it, and data sets of equal length count as the same."""
    return hashlib.sha256(repr(layout_of(dataset)).encode()).hexdigest()


def require_layout(dataset: Any, before: Any) -> None:
    """Who is a record, and that each is there once, was looked at when sampling was made private."""
    if layout_of(dataset) != before:
        raise RuntimeError(
            "the data set has other records than when it was made private (its length, or a Subset's indices, moved): some may be "
            "there twice, and whoever was chosen by what was learnt of them is not covered. Call engine.remove() and make_private "
            "again with the data set as it is now"
        )


# -- how records become a batch -------------------------------------------------------------------------------------------

#: records that are looked at before training
LOOKED_AT = 16
#: how often chance is asked whether it mixes: mixup is often left out, or mixes next to nothing
SEEDS = 8


def fetched(dataset: Any, places: list[int]) -> Any:
    """Records as loaders fetch them: all of a batch at once, in whatever form, where the data set can do that."""
    together = getattr(dataset, "__getitems__", None)
    return together(places) if callable(together) else [dataset[k] for k in places]


def refuse_mixing(loader: DataLoader, grouped: bool) -> None:
    """One record more or less changes one row of a batch. Mixup, or a mean over the batch, in the collate function (or where the
    data set fetches a whole batch) puts a record into the rows of others, whose gradients are clipped as theirs. Where records
    are ``grouped``, rows keep their order."""
    dataset: Any = loader.dataset
    try:
        rows = [dataset[k] for k in range(min(6, len(dataset)))]
        others = [*rows[3:], *map(_larger, rows[2:3])]
    except Exception:  # its own call will tell
        return
    _refuse_mixing(lambda rows: loader.collate_fn(copy.deepcopy(rows)), rows[:3], others, grouped, "the collate function")
    if callable(getattr(dataset, "__getitems__", None)):
        count = min(6, len(dataset))
        places = [k * (len(dataset) - 1) // max(count - 1, 1) for k in range(count)]
        batch = lambda places: loader.collate_fn(fetched(dataset, places))  # noqa: E731
        _refuse_mixing(batch, places[:3], places[3:], grouped, f"{type(dataset).__name__}.__getitems__")
    if grouped:
        _refuse_reordering(loader)


_REORDERED = (
    "{what} puts records into an order of its own (sorted by length?): with unit= a row is its unit's by its place, and a unit "
    "could move as many clipped gradients as it has records. Keep the order of the records (pack_padded_sequence(…, "
    "enforce_sorted=False) needs no other)"
)


def _refuse_reordering(loader: DataLoader) -> None:
    """Rows belong to units by their place. A collate function that sorts (by length, as packed sequences once asked for) gives them
    to others: a unit with k records could move k clipped gradients. Records from all over the data set are more likely to differ
    in what is sorted by than the first few."""
    dataset: Any = loader.dataset
    count = min(LOOKED_AT, len(dataset))

    def made(of: list[Any], seed: int) -> Any:
        with seeded(seed):
            return loader.collate_fn(copy.deepcopy(of))

    try:
        rows = [dataset[k * len(dataset) // count] for k in range(count)]
        whose = _by_record(tree_leaves(made(rows, 0)), tree_leaves(made(rows[:-1], 0)), count)
        forth, again, back = (_rows_of(made(of, seed), whose) for of, seed in ((rows, 0), (rows, 1), (rows[::-1], 0)))
    except Exception:  # its own call will tell
        return
    same = [t.shape for row in forth for t in row] == [t.shape for row in back for t in row]
    if same and not _unmatched(forth, again, True) and _unmatched(forth, back[::-1], True):
        raise ValueError(_REORDERED.format(what="the collate function"))


def _refuse_mixing(batch: Callable[[list[Any]], Any], base: list[Any], others: list[Any], grouped: bool, what: str) -> None:
    """``batch`` makes a batch of ``base``: with one of the ``others`` in the place of one of these, one row is another."""

    def made(of: list[Any], seed: int) -> Any:
        with seeded(seed):
            return batch(of)

    try:
        whose = _by_record(tree_leaves(made(base, 0)), tree_leaves(made(base[:-1], 0)), len(base))
    except Exception:  # its own call will tell
        return
    if len(base) < 3 or not whose:
        return
    first, again, second = (_rows_of(made(base, seed), whose) for seed in (0, 0, 1))
    if _unmatched(first, again, True):
        warnings.warn(
            f"whether {what} mixes records was not checked: it draws random numbers that no seed settles. If it puts "
            "one record into the rows of others (mixup, cutmix), the guarantee does not hold.",
            stacklevel=5,
        )
        return
    by_chance = _unmatched(first, second, True) > 0
    for seed in range(SEEDS if by_chance else 1):
        before = _rows_of(made(base, seed), whose)
        for other, place in itertools.product(others, range(len(base)) if grouped else [-1]):
            changed = list(base)
            changed[place] = other
            try:
                after = _rows_of(made(changed, seed), whose)
            except Exception:  # of a function that looks at values; records as they are will tell
                continue
            if [t.shape for t in before[0]] != [t.shape for t in after[0]]:
                continue  # padded anew, to the left or to the right: what that does is for the module to show
            strange = _unmatched(before, after, grouped)
            if strange > 1 or (grouped and strange and _equal(before[place], after[place])):
                if grouped and _unmatched(before, after, False) <= 1:
                    raise ValueError(_REORDERED.format(what=what))
                raise ValueError(
                    f"{what} puts a record into the rows of others (mixup, cutmix, a mean over the batch): one record "
                    "would move several clipped gradients. Do it to each record by itself, or on public data"
                )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every global generator starts from ``seed``, and is as it was afterwards."""
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002 (what collate functions draw from)
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


def _larger(record: Any) -> Any:
    """A maximum over the batch is seen only if another record has it."""
    return tree_map(lambda t: 50 * t + 1 if isinstance(t, Tensor) and t.is_floating_point() else t, record)


def _by_record(all_rows: list[Any], fewer: list[Any], count: int) -> list[int]:
    """Which leaves of a batch have one row for each record."""
    like = lambda t, n: isinstance(t, Tensor) and t.ndim > 0 and len(t) == n  # noqa: E731
    return [k for k, (a, b) in enumerate(zip(all_rows, fewer)) if like(a, count) and like(b, count - 1)]


def _rows_of(batch: Any, whose: list[int]) -> list[list[Tensor]]:
    """The parts of each row."""
    leaves = tree_leaves(batch)
    return [[leaves[k][r] for k in whose] for r in range(len(leaves[whose[0]]))]


def _unmatched(before: list[list[Tensor]], after: list[list[Tensor]], in_order: bool) -> int:
    """How many rows of one batch are not in the other."""
    if in_order:
        return sum(not _equal(a, b) for a, b in zip(before, after))
    left = list(after)
    for a in before:
        found = next((k for k, b in enumerate(left) if _equal(a, b)), None)
        if found is not None:
            del left[found]
    return len(left)


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(one.double(), other.double(), equal_nan=True) for one, other in zip(a, b, strict=True))
