"""Does the backward pass mix samples? What comes back to one record, at each layer, is its own, whatever the other records hold."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.divisor import Cotangents, check_divisor, check_proportion
from erlangen.gradients.fewer import MixesSamples, watched_rows
from erlangen.gradients.memory import Memory, answers_of, draw_again, restore
from erlangen.gradients.tape import Pieces, Tape, leaves_of
from erlangen.gradients.trace import alike_if_padded, own_copies
from erlangen.gradients.variants import all_unused, more_rows, of_all_sizes, unlike, variants

_ORDER_UNSEEN = (
    "whether every layer sees the records in the order of the batch was not checked: the module returns no tensor with one row "
    "for each of them. If rows are sorted, flipped or shuffled inside the module, the guarantee does not hold."
)


def check_backward(
    module: nn.Module, inputs: tuple[Tensor, ...], start: Memory, batch_first: bool, reduction: str | None
) -> None:
    """The gradient of one output row reaches each layer through that row alone, and whatever other rows hold."""
    from erlangen.gradients.attach import attach, detach, is_attached

    if is_attached(module):
        return
    watch = _Watch({n: p for n, p in module.named_parameters() if p.requires_grad}, batch_first=batch_first)
    watch.whose = {}
    attach(module, watch)
    try:
        with torch.enable_grad():
            few, more = unlike(inputs)
            leaves = {rows: answers_of(module, (more_rows(t, rows) for t in inputs)) for rows in (few, more)}
            columns = _by_row(leaves)
            watch.row, watch.rows_expected = None, few
            _check_losses(module, tuple(more_rows(t, few) for t in inputs), leaves, watch, start, reduction)
            if not columns:
                warnings.warn(_ORDER_UNSEEN, stacklevel=2)
                return
            for rows, asked in ((few, range(few)), (more, range(1))):
                for row in asked:
                    watch.row, watch.rows_expected = row, rows
                    torch.stack([leaves[rows][k][row].float().sum() for k in columns]).sum().backward(retain_graph=True)
            watch.row, watch.rows_expected = None, few
            _check_cotangents(module, tuple(more_rows(t, few) for t in inputs), columns, watch, start)
            if reduction is not None:
                whole = tuple(of_all_sizes(more_rows(t, more)) for t in inputs)
                devices = {t.device for t in inputs if t.is_cuda}

                def back(rows: range, scale: float) -> Cotangents:
                    watch.row, watch.rows_expected = None, len(rows)
                    some = tuple(t[rows.start : rows.stop] if t.ndim else t for t in whole)
                    return _cotangents(module, some, watch, start, partial(_uneven, scale), columns)

                check_divisor(module, back, few, more, reduction, devices)
    finally:
        detach(module)


def _check_cotangents(
    module: nn.Module, inputs: tuple[Tensor, ...], columns: list[int], watch: _Watch, start: Memory
) -> None:
    """What comes back to one row of each layer is the same, whatever the other rows hold and whatever comes back to them."""
    own = _cotangents(module, inputs, watch, start, partial(_others_times, 1.0, 0), columns)
    for row, scale, batch in variants(inputs):
        if not _alike_in(row, own, _cotangents(module, batch, watch, start, partial(_others_times, scale, row), columns)):
            raise MixesSamples(
                "the gradient of one record changes with the other records on its way back through the module, so clipping it "
                "does not bound their influence: a hook or an autograd function works on the whole batch (g / g.norm(), say). "
                "Let it treat each row by itself, or take it out."
            )


def _check_losses(
    module: nn.Module, inputs: tuple[Tensor, ...], returned: dict[int, list[Any]], watch: _Watch, start: Memory,
    reduction: str | None,
) -> None:  # fmt: skip
    """Where the module returns or keeps a loss of the whole batch: the gradient of one row is the same, whatever others hold; and
    under a mean in proportion to what the loss is multiplied by."""
    single = lambda t: isinstance(t, Tensor) and t.requires_grad and t.ndim == 0  # noqa: E731
    places = [k for k, column in enumerate(zip(*returned.values())) if all(map(single, column))]
    if not places:
        return
    unused = ((row, 1.0, tuple(all_unused(t, row) for t in inputs)) for row in watched_rows(inputs))
    back = lambda batch, scale: _cotangents(module, batch, watch, start, lambda leaf: leaf * scale, places)  # noqa: E731
    own = back(inputs, 1.0)
    for row, _, batch in itertools.chain(variants(inputs), unused):
        if not _alike_in(row, own, back(batch, 1.0)):
            raise MixesSamples(
                "the module returns (or keeps in an attribute) a loss of the whole batch in which the gradient of one record "
                "changes with the others: a mean over the labels that are not ignored divides by how many the batch has, say. Let "
                "it return the logits, and take the mean over each record by itself; a term that is not trained on is detached."
            )
    if reduction == "mean":
        check_proportion(module, partial(back, inputs))


def _others_times(scale: float, row: int, leaf: Tensor) -> Tensor:
    return scale * leaf.sum() + (1 - scale) * leaf[row].sum()


def _uneven(scale: float, leaf: Tensor) -> Tensor:
    """Entries of a row count differently: of their plain sum a softmax or a norm sends nothing back but rounding."""
    weights = torch.linspace(1.0, 2.0, leaf[0].numel(), device=leaf.device).view(leaf[0].shape)
    return (leaf * weights).sum() * scale


def _cotangents(
    module: nn.Module, batch: tuple[Tensor, ...], watch: _Watch, start: Memory, end: Callable[[Tensor], Tensor], places: list[int]
) -> Cotangents:
    """What comes back to each layer in a pass from the start, from what ``end`` makes of some of the outputs."""
    restore(module, start)
    draw_again()
    watch.seen, watch.whose = {}, {}
    leaves = answers_of(module, own_copies(batch))
    torch.stack([end(leaves[k].float()) for k in places]).sum().backward()
    return watch.seen


def _alike_in(row: int, own: Cotangents, other: Cotangents) -> bool:
    """The calls of each layer, the first with the first; what is called for others alone sends nothing back to the row."""
    return all(
        alike_if_padded(a[row], b[row]) if a is not None and b is not None else not bool((b if a is None else a)[row].any())
        for layer in own.keys() | other.keys()
        for a, b in itertools.zip_longest(reversed(own.get(layer, [])), reversed(other.get(layer, [])))
    )


def _by_row(leaves: dict[int, list[Any]]) -> list[int]:
    """Of what a module returned for each number of rows: where the differentiable tensors with one row for each record are."""
    like = lambda t, rows: isinstance(t, Tensor) and t.requires_grad and t.ndim > 0 and len(t) == rows  # noqa: E731
    found = enumerate(zip(*leaves.values()))
    return [k for k, column in found if all(like(t, rows) for t, rows in zip(column, leaves, strict=True))]


class _Watch(Tape):
    """A tape that objects to cotangents outside the row that was asked for; where none was, it keeps them."""

    row: int | None = 0
    rows_expected = 0
    seen: Cotangents
    #: the parameters behind each use of a layer
    whose: dict[Pieces, tuple[int, ...]]

    def tap(
        self, out: Tensor, saved: tuple[Tensor, ...], parameters: tuple[Tensor | None, ...], pieces: Pieces, batch_dim: int = 0
    ) -> Tensor:
        trained = (p for p in parameters if p is not None and p.requires_grad)
        self.whose[pieces] = tuple(id(leaf) for p in trained for leaf in leaves_of(p))  # a computed weight is another each time
        return super().tap(out, saved, parameters, pieces, batch_dim)

    def _capture(self, use: Any, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        self._look(self.whose.get(use.pieces), cotangent.movedim(use.batch_dim, 0) if use.batch_dim else cotangent)

    def _capture_rows(self, per_row: Any, count: int, batch: int) -> None:
        for parameter, g in per_row.items():
            self._look(id(parameter), g)

    def _look(self, layer: Hashable, by_row: Tensor) -> None:
        if by_row.shape[0] != self.rows_expected:
            raise MixesSamples(
                f"a layer sees {by_row.shape[0]} rows where the batch has {self.rows_expected}: its gradients cannot be told "
                "apart by record. Keep the batch as the first dimension (batch_first=False for time-major sequences); give "
                "positional tables a batch dimension, e.g. positions.expand(len(x), -1)."
            )
        if self.row is None:
            self.seen.setdefault(layer, []).append(by_row.detach().clone())
            return
        others = by_row.detach().reshape(len(by_row), -1).abs().amax(1) if by_row[0].numel() else by_row.new_zeros(by_row.shape[0])
        others[self.row] = 0
        if bool((others > 0).any()):
            raise MixesSamples(
                "a layer sees the records in another order than the model's output (rows are sorted, flipped or shuffled "
                "inside the model), so gradients of different records would be clipped as one. Keep the order of rows; layers that "
                "see time-major sequences want batch_first=False."
            )
