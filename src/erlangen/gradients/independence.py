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

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.gradients.fewer import MixesSamples, check_fewer, check_state, watched_rows
from erlangen.gradients.independence_backward import check_backward
from erlangen.gradients.memory import (
    Memory,
    attributes_untouched,
    draw_again,
    modes_untouched,
    remembered,
    restore,
    untouched,
)
from erlangen.gradients.precision import repeatable
from erlangen.gradients.problems import where
from erlangen.gradients.trace import Trace, own_copies, paired, same, trace
from erlangen.gradients.variants import SCALES, changed, more_rows, not_finite, padded, told_apart, unlike, variants

#: rows of one more experiment, with so many numbers at most: some modules mix where there are many (chunks of 16, say)
MANY, MOST_NUMBERS = 33, 1 << 19


@repeatable()  # and for batches of another length a GPU rounds products of ten bits otherwise
def check_independence(
    module: nn.Module, inputs: tuple[Tensor, ...], batch_first: bool = True, reduction: str | None = None
) -> None:
    """Raise `MixesSamples` if, in training or evaluation mode, a module mixes rows, reorders them, or keeps statistics.

    ``batch_first`` is what `make_private` is told: whether sequences *inside* the module have the batch first or the time.
    ``reduction`` is that of the loss, where the number of rows is private: what comes back must not depend on it.
    """
    inputs = told_apart(module, inputs)
    with modes_untouched(module):
        for batch, training in itertools.product((inputs, *padded(module, inputs)), (True, False)):
            module.train(training)
            with untouched(module) as start:
                _check_outputs(module, batch, start)
                if training:
                    check_backward(module, batch, start, batch_first, reduction)
        with untouched(module) as start:
            _check_answers(module, inputs)
            module.train()
            _check_many(module, inputs, start)


def _check_outputs(module: nn.Module, inputs: tuple[Tensor, ...], start: Memory) -> None:
    """Each row of every output depends on that row of the inputs alone, and no buffer and no parameter on any of them."""
    watched = watched_rows(inputs)
    first = trace(module, inputs, watched)
    known = start.tensors
    after = known | {n: t.detach().clone() for n, t in remembered(module) if n not in known or not torch.equal(t, known[n])}
    spoilt = [(row, " where they are not finite", not_finite(inputs, row)) for row in watched[:2]]
    for row, when, batch in [*((row, "", batch) for row, _, batch in variants(inputs)), *spoilt]:
        restore(module, start)
        try:
            with attributes_untouched(module) if when else contextlib.nullcontext():  # nan would stay in whatever is kept
                second = trace(module, batch, [row])
        except Exception:
            if when:  # it raises where a record is not finite: then nothing is released
                continue
            raise
        for a, b in paired(first, second):
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
    rows, _ = unlike(inputs, min(MANY, MOST_NUMBERS // max(1, sum(t[0].numel() for t in inputs if t.ndim))))
    if rows <= len(inputs[0]):
        return
    batch, ends = tuple(more_rows(t, rows) for t in inputs), [0, rows - 1]

    def traced(batch: tuple[Tensor, ...], watched: list[int]) -> Trace:
        restore(module, start)
        try:
            with attributes_untouched(module):
                return trace(module, batch, watched)
        except Exception:  # of a module for batches of one size, say: its own call will tell
            return Trace([], False)

    first = traced(batch, ends)
    for place, row in enumerate(ends):
        second = traced(tuple(changed(t, SCALES[0], row) for t in batch), [row])
        culprit = next((a for a, b in paired(first, second) if not a.same(b, place)), None)
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
                    draw_again()
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


def check_padding(module: nn.Module, alone: Tensor, beside: Tensor) -> None:
    """Raise if a record's output changes with the length to which the batch pads it. Both hold the record alone, [1, …]."""
    try:
        with modes_untouched(module), untouched(module), torch.no_grad():
            module.eval()
            outs = [module(t.clone()) for t in (alone, beside)]
    except Exception:  # of a module that takes more than the first part of a batch: its own call will tell
        return
    if not all(isinstance(out, Tensor) for out in outs) or outs[0].ndim != outs[1].ndim:
        return
    common = tuple(slice(min(sizes)) for sizes in zip(*(out.shape for out in outs), strict=True))
    if not same([outs[0][common]], [outs[1][common]]):
        raise MixesSamples(
            "records have different lengths, and the output for one changes with the length to which its batch is padded: a long "
            "record moves the gradients of all others. Pad to one fixed length in the data set, or let the module ignore padding "
            "by itself; if your loop hands it a mask, check with that and pass check=False."
        )
