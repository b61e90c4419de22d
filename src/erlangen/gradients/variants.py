"""Batches that differ from one another in the right places: what an experiment shows a module to see whether it mixes samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from erlangen.gradients.fewer import watched_rows
from erlangen.gradients.memory import attributes_untouched, untouched
from erlangen.gradients.trace import own_copies

#: how large the other rows are made: a maximum over the batch is seen only if they are larger, a minimum if smaller
SCALES = (2.0, 50.0, 0.02)


def told_apart(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Integers that are the same for all records (lengths, masks) would hide what a module makes of the largest of a batch."""
    apart = tuple(_one_less(t) for t in inputs)
    if all(a is b for a, b in zip(apart, inputs, strict=True)):
        return inputs
    return apart if can_take(module, apart) else inputs  # or these are no lengths


def _one_less(t: Tensor) -> Tensor:
    """Integers of which all rows are the same, but with one less as the last entry of the last, if that is a length or index."""
    if t.is_floating_point() or t.is_complex() or t.ndim < 1 or len(t) < 2 or not t[0].numel() or not bool((t == t[:1]).all()):
        return t
    other = t.clone(memory_format=torch.contiguous_format)
    last, several = other.view(len(t), -1)[-1], t[0].numel() > 1
    if t.dtype == torch.bool:
        last[-1] = ~last[-1] if several or t.ndim == 1 else last[-1]
    elif int(last[-1]) >= (1 if several else 2):  # no record has length zero
        last[-1] -= 1
    return other


def padded(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The same with sequences that end in zeros, each after another length, none of which is the whole one: a module that reads the
    length of its records from them may sort by it, or cut the batch at the largest. Nothing if there are no sequences."""
    lengths = lambda t: [1 + (r + 1) * (t.shape[1] - 2) // (len(t) + 1) for r in (*range(1, len(t)), 0)]  # noqa: E731

    def ending_in_zeros(t: Tensor) -> Tensor:
        features = t.is_floating_point()
        if t.is_complex() or t.ndim not in ((2, 3) if features else (2,)) or t.shape[1] < 4:
            return t
        if not (features or t.dtype == torch.bool or int(t.min()) >= 0):  # labels of which some are ignored
            return t
        kept = torch.arange(t.shape[1], device=t.device) < torch.tensor(lengths(t), device=t.device)[:, None]
        return torch.where(kept if t.ndim == 2 else kept[..., None], t, torch.zeros_like(t))

    short = tuple(map(ending_in_zeros, inputs))
    if all(a is b for a, b in zip(short, inputs, strict=True)) or not can_take(module, short):
        return []
    return [short]


def can_take(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether the module can be called with these; nothing of the call remains."""
    try:
        with untouched(module), attributes_untouched(module), torch.no_grad():
            module(*own_copies(inputs))
    except Exception:
        return False
    return True


def variants(inputs: tuple[Tensor, ...]) -> Iterator[tuple[int, float, tuple[Tensor, ...]]]:
    """(a row, how large the others are, the batch in which all but that row are others)."""
    for place, row in enumerate(watched_rows(inputs)):
        # whatever runs along the batch shows at one of its ends; the row between is for integers, which are not made up: the
        # ends may hold the largest (lengths, say), which no other row can change
        if place == 2 and all(t.is_floating_point() for t in inputs):
            return
        for scale in SCALES if place < 2 else SCALES[:1]:
            yield row, scale, tuple(changed(t, scale, row) for t in inputs)
        if place < 2:  # whoever is alike competes: for the places of an expert, or to be the first of its kind
            yield row, 1.0, tuple(_copies(t, row) for t in inputs)


def _copies(t: Tensor, row: int) -> Tensor:
    return t[[row]].expand_as(t).clone() if t.ndim and t.shape[0] > row else t


def changed(t: Tensor, scale: float = 2.0, row: int = 0) -> Tensor:
    """The same tensor with every row but one replaced by other values of the same kind."""
    if not t.ndim or t.shape[0] < 2 or t.shape[0] <= row:
        return t
    other = scale * torch.randn_like(t) + scale / 2 if t.is_floating_point() else _copies(t, row)
    other[row] = t[row]
    return other


def not_finite(inputs: tuple[Tensor, ...], row: int) -> tuple[Tensor, ...]:
    """All rows but one are nan or infinite: whoever asks ``isnan().any()`` of a batch lets one record speak for all."""

    def spoilt(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.ndim:
            return t
        other = torch.full_like(t, torch.inf)
        other[::2] = torch.nan
        other[row] = t[row]
        return other

    return tuple(map(spoilt, inputs))


def all_unused(t: Tensor, row: int) -> Tensor:
    """Integers of which some are negative are no indices, but labels of which some are ignored: here all but those of ``row``."""
    if t.is_floating_point() or t.is_complex() or not t.numel() or t.dtype == torch.bool or int(t.min()) >= 0:
        return t
    other = torch.full_like(t, int(t.min()))
    other[row] = t[row]
    return other


def unlike(inputs: tuple[Tensor, ...], least: int = 5) -> tuple[int, int]:
    """Two numbers of rows that are no other size of the inputs: a layer that sees tokens first must not seem to see records."""
    sizes = {size for t in inputs for size in t.shape[1:]}
    few, more = itertools.islice((n for n in itertools.count(least, 2) if n not in sizes), 2)
    return few, more


def of_all_sizes(t: Tensor) -> Tensor:
    """The same with some rows larger and some smaller: what a module does with such records alone is seen."""
    if not t.is_floating_point() or not t.ndim:
        return t
    sizes = torch.tensor((1.0, *SCALES), dtype=t.dtype, device=t.device)
    return t * sizes[torch.arange(len(t)) % len(sizes)].view(-1, *[1] * (t.ndim - 1))


def more_rows(t: Tensor, rows: int) -> Tensor:
    if not t.ndim:
        return t
    again = t[torch.arange(rows) % len(t)]
    if not t.is_floating_point():
        return again
    return torch.where(again == 0, 0.0, torch.randn(rows, *t.shape[1:], dtype=t.dtype, device=t.device))
