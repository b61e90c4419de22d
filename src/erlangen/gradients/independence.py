"""Does any module mix samples? Those that are known by type are `problems`; all others are found by experiment.

The experiment: run a batch, change everything but one row, run again with the same random numbers. A module whose inputs
agree in that row but whose outputs do not has looked at other rows; per-sample clipping would not bound their influence.
Neither would it where only the backward pass looks at them: a hook that divides gradients by their norm over the batch.
The row is the first, the last, and one between: what runs along the batch (a cumulative sum, a recurrent layer that takes
records for time) leaves the first alone.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.gradients.divisor import check_divisor
from erlangen.gradients.fewer import MixesSamples, check_fewer, check_state, watched_rows
from erlangen.gradients.memory import Memory, answers_of, attributes_untouched, remembered, restore, untouched
from erlangen.gradients.problems import where
from erlangen.gradients.tape import Tape
from erlangen.gradients.trace import Call, alike_if_padded, own_copies, same, trace
from erlangen.streams import seed_layers

#: rows of one more experiment, with so many numbers at most: some modules mix where there are many (chunks of 16, say)
MANY, MOST_NUMBERS = 33, 1 << 19
#: how large the other rows are made: a maximum over the batch is seen only if they are larger, a minimum if smaller
SCALES = (2.0, 50.0, 0.02)

_ORDER_UNSEEN = (
    "whether every layer sees the records in the order of the batch was not checked: the module returns no tensor with one row "
    "for each of them. If rows are sorted, flipped or shuffled inside the module, the guarantee does not hold."
)


def check_independence(
    module: nn.Module, inputs: tuple[Tensor, ...], batch_first: bool = True, reduction: str | None = None
) -> None:
    """Raise `MixesSamples` if, in training or evaluation mode, a module mixes rows, reorders them, or keeps statistics.

    ``batch_first`` is what `make_private` is told: whether sequences *inside* the module have the batch first or the time.
    ``reduction`` is that of the loss, where the number of rows is private: what comes back must not depend on it.
    """
    modes = {m: m.training for m in module.modules()}
    inputs = _told_apart(module, inputs)
    try:
        for batch, training in itertools.product((inputs, *_padded(module, inputs)), (True, False)):
            module.train(training)
            with untouched(module) as start:
                _check_outputs(module, batch, start)
                if training:
                    _check_rows(module, batch, start, batch_first, reduction)
        with untouched(module) as start:
            _check_answers(module, inputs)
            module.train()
            _check_many(module, inputs, start)
    finally:
        for m, training in modes.items():
            m.training = training


def _check_outputs(module: nn.Module, inputs: tuple[Tensor, ...], start: Memory) -> None:
    """Each row of every output depends on that row of the inputs alone, and no buffer and no parameter on any of them."""
    watched = watched_rows(inputs)
    first = trace(module, inputs, watched)
    known = start.tensors
    after = known | {n: t.detach().clone() for n, t in remembered(module) if n not in known or not torch.equal(t, known[n])}
    spoilt = [(row, " where they are not finite", _not_finite(inputs, row)) for row in watched[:2]]
    for row, when, batch in [*((row, "", batch) for row, _, batch in _variants(inputs)), *spoilt]:
        restore(module, start)
        try:
            with attributes_untouched(module) if when else contextlib.nullcontext():  # nan would stay in whatever is kept
                second = trace(module, batch, [row])
        except Exception:
            if when:  # it raises where a record is not finite: then nothing is released
                continue
            raise
        for a, b in zip(first.calls, second.calls, strict=False):
            if not a.same(b, watched.index(row)):
                raise MixesSamples(
                    f"{where(a.path, a.module)} mixes samples: its output for one record changes with the other records of the "
                    f"batch{when}, so clipping one record's gradient does not bound its influence. Make it treat rows "
                    "independently (GroupNorm or LayerNorm in place of batch statistics), or call erlangen.fix(model)."
                )
        if not when:
            check_state(module, after, "is updated from the data")
    check_fewer(module, inputs, first, after, start)


def _check_many(module: nn.Module, inputs: tuple[Tensor, ...], start: Memory) -> None:
    """In a batch of `MANY`, too, the first and the last row are what they are, whatever the others hold."""
    rows, _ = _unlike(inputs, min(MANY, MOST_NUMBERS // max(1, sum(t[0].numel() for t in inputs if t.ndim))))
    if rows <= len(inputs[0]):
        return
    batch, ends = tuple(_more_rows(t, rows) for t in inputs), [0, rows - 1]

    def traced(batch: tuple[Tensor, ...], watched: list[int]) -> list[Call]:
        restore(module, start)
        try:
            with attributes_untouched(module):
                return trace(module, batch, watched).calls
        except Exception:  # of a module for batches of one size, say: its own call will tell
            return []

    first = traced(batch, ends)
    for place, row in enumerate(ends):
        second = traced(tuple(changed(t, SCALES[0], row) for t in batch), [row])
        culprit = next((a for a, b in zip(first, second) if not a.same(b, place)), None)
        if culprit is not None:
            raise MixesSamples(
                f"{where(culprit.path, culprit.module)} mixes samples in larger batches: in one of {rows} records its output for "
                "one changes with the others, and clipping one record's gradient does not bound its influence. Make it treat rows "
                "independently, however many there are."
            )


def _check_answers(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """In evaluation a module answers by its weights and buffers: what it saw in training it may have kept elsewhere."""
    answers: list[list[Tensor]] = []
    for seen in (inputs, tuple(changed(t, SCALES[1], 0) for t in inputs), tuple(t[:-1] if t.ndim else t for t in inputs)):
        with untouched(module), attributes_untouched(module), torch.enable_grad():
            try:
                for training, batch in ((True, seen), (False, inputs)):
                    module.train(training)
                    torch.manual_seed(0)
                    out = module(*own_copies(batch))
            except Exception:  # of a module for batches of one size, say: its own call will tell
                continue
            answers.append([t.detach() for t in tree_leaves(out) if isinstance(t, Tensor)])
    if any(not same(answers[0], other) for other in answers[1:]):
        raise MixesSamples(
            "what the module answers in evaluation depends on the records that it saw in training, beside its weights: it keeps "
            "something of them in a plain attribute (a running mean, say), which no noise covers. Drop it, or compute it on public "
            "data."
        )


def _told_apart(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Integers that are the same for all records (lengths, masks) would hide what a module makes of the largest of a batch."""
    apart = tuple(_one_less(t) for t in inputs)
    if all(a is b for a, b in zip(apart, inputs, strict=True)):
        return inputs
    return apart if _can_take(module, apart) else inputs  # or these are no lengths


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


def _padded(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The same with sequences that end in zeros, each after another length, none of which is the whole one: a module that reads the
    length of its records from them may sort by it, or cut the batch at the largest. Nothing if there are no sequences."""
    lengths = lambda t: [1 + (r + 1) * (t.shape[1] - 2) // (len(t) + 1) for r in (*range(1, len(t)), 0)]  # noqa: E731

    def padded(t: Tensor) -> Tensor:
        features = t.is_floating_point()
        if t.is_complex() or t.ndim not in ((2, 3) if features else (2,)) or t.shape[1] < 4:
            return t
        if not (features or t.dtype == torch.bool or int(t.min()) >= 0):  # labels of which some are ignored
            return t
        kept = torch.arange(t.shape[1], device=t.device) < torch.tensor(lengths(t), device=t.device)[:, None]
        return torch.where(kept if t.ndim == 2 else kept[..., None], t, torch.zeros_like(t))

    short = tuple(map(padded, inputs))
    if all(a is b for a, b in zip(short, inputs, strict=True)) or not _can_take(module, short):
        return []
    return [short]


def _can_take(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    try:
        with untouched(module), attributes_untouched(module), torch.no_grad():
            module(*own_copies(inputs))
    except Exception:
        return False
    return True


def _variants(inputs: tuple[Tensor, ...]) -> Iterator[tuple[int, float, tuple[Tensor, ...]]]:
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


def _not_finite(inputs: tuple[Tensor, ...], row: int) -> tuple[Tensor, ...]:
    """All rows but one are nan or infinite: whoever asks ``isnan().any()`` of a batch lets one record speak for all."""

    def spoilt(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.ndim:
            return t
        other = torch.full_like(t, torch.inf)
        other[::2] = torch.nan
        other[row] = t[row]
        return other

    return tuple(map(spoilt, inputs))


def _check_rows(
    module: nn.Module, inputs: tuple[Tensor, ...], start: Memory, batch_first: bool, reduction: str | None
) -> None:
    """Backwards: the gradient of one output row reaches each layer through that row alone, and whatever other rows hold."""
    from erlangen.gradients.attach import attach, detach, is_attached

    if is_attached(module):
        return
    watch = _Watch({n: p for n, p in module.named_parameters() if p.requires_grad}, batch_first=batch_first)
    attach(module, watch)
    try:
        with torch.enable_grad():
            few, more = _unlike(inputs)
            leaves = {rows: answers_of(module, (_more_rows(t, rows) for t in inputs)) for rows in (few, more)}
            columns = _by_row(leaves)
            watch.row, watch.rows_expected = None, few
            _check_losses(module, tuple(_more_rows(t, few) for t in inputs), leaves, watch, start)
            if not columns:
                warnings.warn(_ORDER_UNSEEN, stacklevel=2)
                return
            for rows, asked in ((few, range(few)), (more, range(1))):
                for row in asked:
                    watch.row, watch.rows_expected = row, rows
                    torch.stack([leaves[rows][k][row].float().sum() for k in columns]).sum().backward(retain_graph=True)
            watch.row, watch.rows_expected = None, few
            _check_cotangents(module, tuple(_more_rows(t, few) for t in inputs), columns, watch, start)
            if reduction is not None:
                whole, devices = tuple(_more_rows(t, more) for t in inputs), {t.device for t in inputs if t.is_cuda}

                def back(rows: int, scale: float) -> _Cotangents:
                    watch.row, watch.rows_expected = None, rows
                    some = tuple(t[:rows] if t.ndim else t for t in whole)
                    return _cotangents(module, some, watch, start, partial(_uneven, scale), columns)

                check_divisor(module, back, few, more, reduction, devices)
    finally:
        detach(module)


def _check_cotangents(
    module: nn.Module, inputs: tuple[Tensor, ...], columns: list[int], watch: _Watch, start: Memory
) -> None:
    """What comes back to one row of each layer is the same, whatever the other rows hold and whatever comes back to them."""
    own = _cotangents(module, inputs, watch, start, partial(_others_times, 1.0, 0), columns)
    for row, scale, batch in _variants(inputs):
        if not _alike_in(row, own, _cotangents(module, batch, watch, start, partial(_others_times, scale, row), columns)):
            raise MixesSamples(
                "the gradient of one record changes with the other records on its way back through the module, so clipping it "
                "does not bound their influence: a hook or an autograd function works on the whole batch (g / g.norm(), say). "
                "Let it treat each row by itself, or take it out."
            )


def _check_losses(
    module: nn.Module, inputs: tuple[Tensor, ...], returned: dict[int, list[Any]], watch: _Watch, start: Memory
) -> None:
    """Where the module returns or keeps a loss of the whole batch: the gradient of one row is the same, whatever others hold."""
    single = lambda t: isinstance(t, Tensor) and t.requires_grad and t.ndim == 0  # noqa: E731
    places = [k for k, column in enumerate(zip(*returned.values())) if all(map(single, column))]
    if not places:
        return
    unused = ((row, 1.0, tuple(_all_unused(t, row) for t in inputs)) for row in watched_rows(inputs))
    own = _cotangents(module, inputs, watch, start, lambda leaf: leaf, places)
    for row, _, batch in itertools.chain(_variants(inputs), unused):
        if not _alike_in(row, own, _cotangents(module, batch, watch, start, lambda leaf: leaf, places)):
            raise MixesSamples(
                "the module returns (or keeps in an attribute) a loss of the whole batch in which the gradient of one record "
                "changes with the others: a mean over the labels that are not ignored divides by how many the batch has, say. Let "
                "it return the logits, and take the mean over each record by itself; a term that is not trained on is detached."
            )


def _others_times(scale: float, row: int, leaf: Tensor) -> Tensor:
    return scale * leaf.sum() + (1 - scale) * leaf[row].sum()


def _uneven(scale: float, leaf: Tensor) -> Tensor:
    """Entries of a row count differently: of their plain sum a softmax or a norm sends nothing back but rounding."""
    weights = torch.linspace(1.0, 2.0, leaf[0].numel(), device=leaf.device).view(leaf[0].shape)
    return (leaf * weights).sum() * scale


#: of each layer, by row, what came back to those that are watched
_Cotangents = list[dict[int, Tensor]]


def _cotangents(
    module: nn.Module, batch: tuple[Tensor, ...], watch: _Watch, start: Memory, end: Callable[[Tensor], Tensor], places: list[int]
) -> _Cotangents:
    """What comes back to each layer in a pass from the start, from what ``end`` makes of some of the outputs."""
    restore(module, start)
    seed_layers(0)
    watch.seen, watch.kept = [], watched_rows(batch)
    leaves = answers_of(module, own_copies(batch))
    torch.stack([end(leaves[k].float()) for k in places]).sum().backward()
    return watch.seen


def _alike_in(row: int, own: _Cotangents, other: _Cotangents) -> bool:
    return all(alike_if_padded(a[row], b[row]) for a, b in zip(own, other, strict=False))


def _all_unused(t: Tensor, row: int) -> Tensor:
    """Integers of which some are negative are no indices, but labels of which some are ignored: here all but those of ``row``."""
    if t.is_floating_point() or t.is_complex() or not t.numel() or t.dtype == torch.bool or int(t.min()) >= 0:
        return t
    other = torch.full_like(t, int(t.min()))
    other[row] = t[row]
    return other


def _by_row(leaves: dict[int, list[Any]]) -> list[int]:
    """Of what a module returned for each number of rows: where the differentiable tensors with one row for each record are."""
    like = lambda t, rows: isinstance(t, Tensor) and t.requires_grad and t.ndim > 0 and len(t) == rows  # noqa: E731
    found = enumerate(zip(*leaves.values()))
    return [k for k, column in found if all(like(t, rows) for t, rows in zip(column, leaves, strict=True))]


class _Watch(Tape):
    """A tape that objects to cotangents outside the row that was asked for; where none was, it keeps those of some rows."""

    row: int | None = 0
    rows_expected = 0
    kept: Sequence[int] = ()
    seen: _Cotangents

    def _capture(self, use: Any, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        self._look(cotangent.movedim(use.batch_dim, 0) if use.batch_dim else cotangent)

    def _capture_rows(self, per_row: Any, count: int, batch: int) -> None:
        for g in per_row.values():
            self._look(g)

    def _look(self, by_row: Tensor) -> None:
        if by_row.shape[0] != self.rows_expected:
            raise MixesSamples(
                f"a layer sees {by_row.shape[0]} rows where the batch has {self.rows_expected}: its gradients cannot be told "
                "apart by record. Keep the batch as the first dimension (batch_first=False for time-major sequences); give "
                "positional tables a batch dimension, e.g. positions.expand(len(x), -1)."
            )
        if self.row is None:
            self.seen.append({row: by_row[row].detach().clone() for row in self.kept})
            return
        others = by_row.detach().reshape(len(by_row), -1).abs().amax(1) if by_row[0].numel() else by_row.new_zeros(by_row.shape[0])
        others[self.row] = 0
        if bool((others > 0).any()):
            raise MixesSamples(
                "a layer sees the records in another order than the model's output (rows are sorted, flipped or shuffled "
                "inside the model), so gradients of different records would be clipped as one. Keep the order of rows; layers that "
                "see time-major sequences want batch_first=False."
            )


def _unlike(inputs: tuple[Tensor, ...], least: int = 5) -> tuple[int, int]:
    """Two numbers of rows that are no other size of the inputs: a layer that sees tokens first must not seem to see records."""
    sizes = {size for t in inputs for size in t.shape[1:]}
    few, more = itertools.islice((n for n in itertools.count(least, 2) if n not in sizes), 2)
    return few, more


def _more_rows(t: Tensor, rows: int) -> Tensor:
    if not t.ndim:
        return t
    again = t[torch.arange(rows) % len(t)]
    if not t.is_floating_point():
        return again
    return torch.where(again == 0, 0.0, torch.randn(rows, *t.shape[1:], dtype=t.dtype, device=t.device))


def check_padding(module: nn.Module, alone: Tensor, beside: Tensor) -> None:
    """Raise if a record's output changes with the length to which the batch pads it. Both hold the record alone, [1, …]."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with untouched(module), torch.no_grad():
            outs = [module(t.clone()) for t in (alone, beside)]
    except Exception:  # of a module that takes more than the first part of a batch: its own call will tell
        return
    finally:
        for m, training in modes.items():
            m.training = training
    if not all(isinstance(out, Tensor) for out in outs) or outs[0].ndim != outs[1].ndim:
        return
    common = tuple(slice(min(sizes)) for sizes in zip(*(out.shape for out in outs), strict=True))
    if not same([outs[0][common]], [outs[1][common]]):
        raise MixesSamples(
            "records have different lengths, and the output for one changes with the length to which its batch is padded: a long "
            "record moves the gradients of all others. Pad to one fixed length in the data set, or let the module ignore padding "
            "by itself; if your loop hands it a mask, check with that and pass check=False."
        )


def changed(t: Tensor, scale: float = 2.0, row: int = 0) -> Tensor:
    """The same tensor with every row but one replaced by other values of the same kind."""
    if not t.ndim or t.shape[0] < 2 or t.shape[0] <= row:
        return t
    other = scale * torch.randn_like(t) + scale / 2 if t.is_floating_point() else _copies(t, row)
    other[row] = t[row]
    return other
