"""Does any module mix samples? Those that are known by type are `problems`; all others are found by experiment.

The experiment: run a batch, change everything but row 0, run again with the same random numbers. A module whose inputs
agree in row 0 but whose outputs do not has looked at other rows; per-sample clipping would not bound their influence.
Neither would it where only the backward pass looks at them: a hook that divides gradients by their norm over the batch.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.gradients.problems import where
from erlangen.gradients.tape import Tape

#: how large the other rows are made: a maximum over the batch is seen only if they are larger, a minimum if smaller
SCALES = (2.0, 50.0, 0.02)

_ORDER_UNSEEN = (
    "whether every layer sees the records in the order of the batch was not checked: the module returns no tensor with one row "
    "for each of them. If rows are sorted, flipped or shuffled inside the module, the guarantee does not hold."
)

#: a module's path, itself, and row 0 of what it was given and of what it returned
_Call = tuple[str, nn.Module, list[Tensor], list[Tensor]]


class MixesSamples(ValueError):
    """A module whose output for one record depends on others."""


def check_independence(module: nn.Module, inputs: tuple[Tensor, ...], batch_first: bool = True) -> None:
    """Raise `MixesSamples` if, in training or evaluation mode, a module mixes rows, reorders them, or keeps statistics.

    ``batch_first`` is what `make_private` is told: whether sequences *inside* the module have the batch first or the time.
    """
    modes = {m: m.training for m in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            with _untouched(module) as start:
                _check_outputs(module, inputs, start)
                if training:
                    _check_rows(module, inputs, start, batch_first)
    finally:
        for m, training in modes.items():
            m.training = training


def _check_outputs(module: nn.Module, inputs: tuple[Tensor, ...], start: _Memory) -> None:
    """Row 0 of every output depends on row 0 of the inputs alone, and no buffer and no parameter on any of them."""
    first = _trace(module, inputs)
    known = start.tensors
    after = known | {n: t.detach().clone() for n, t in _state(module) if n not in known or not torch.equal(t, known[n])}
    for scale in SCALES:
        _restore(module, start)
        second = _trace(module, tuple(changed(t, scale) for t in inputs))
        for (path, m, in_a, out_a), (_, _, in_b, out_b) in zip(first, second, strict=False):
            if same(in_a, in_b) and not same(out_a, out_b):
                raise MixesSamples(
                    f"{where(path, m)} mixes samples: its output for one record changes with the other records of the "
                    "batch, so clipping one record's gradient does not bound its influence. Make it treat rows "
                    "independently (GroupNorm or LayerNorm in place of batch statistics), or call erlangen.fix(model)."
                )
        _check_state(module, after, "is updated from the data")
    _restore(module, start)
    _check_fewer(module, inputs, first, after)


def _check_state(module: nn.Module, expected: dict[str, Tensor], what: str) -> None:
    """Whatever a module remembers after a pass is what it remembers after any other."""
    for name, t in _state(module):
        before = expected.get(name)
        if before is None or (not torch.equal(t, before) and not same([t], [before])):
            kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise MixesSamples(
                f"the {kind} {name!r} {what}: it would be released with the weights, without noise. "
                "Drop the running statistics (GroupNorm needs none), or compute them on public data."
            )


def _check_fewer(module: nn.Module, inputs: tuple[Tensor, ...], first: list[_Call], after: dict[str, Tensor]) -> None:
    """Row 0 of every output, and all that is remembered, is the same with one record less: how many were drawn is as private as
    who they are."""
    rows = inputs[0].shape[0]
    try:
        second = _trace(module, tuple(t[:-1] if t.ndim and len(t) == rows else t for t in inputs))
    except Exception:  # of a module for batches of one size: the first Poisson batch will tell
        return
    _check_state(module, after, "counts the records of each batch")
    if module.training:  # with dropout other shapes draw other numbers
        return
    for (path, m, in_a, out_a), (_, _, in_b, out_b) in zip(first, second, strict=False):
        # other kernels for other shapes round otherwise, in TF32 and 16 bits by a percent: a third less is more than that
        if len(out_a) == len(out_b) and same(in_a, in_b) and not all(map(_alike, out_a, out_b, itertools.repeat(0.05))):
            raise MixesSamples(
                f"{where(path, m)} mixes samples: its output for one record changes with how many records the batch has, so one "
                "more moves the gradients of all others. Let it divide by a constant, not by the length of the batch."
            )


def _check_rows(module: nn.Module, inputs: tuple[Tensor, ...], start: _Memory, batch_first: bool) -> None:
    """Backwards: the gradient of one output row reaches each layer through that row alone, and whatever other rows hold."""
    from erlangen.gradients.attach import attach, detach, is_attached

    if is_attached(module):
        return
    watch = _Watch({n: p for n, p in module.named_parameters() if p.requires_grad}, batch_first=batch_first)
    attach(module, watch)
    try:
        with torch.enable_grad():
            few, more = _unlike(inputs)
            leaves = {rows: tree_leaves(module(*(_more_rows(t, rows) for t in inputs))) for rows in (few, more)}
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
    finally:
        detach(module)


def _check_cotangents(
    module: nn.Module, inputs: tuple[Tensor, ...], columns: list[int], watch: _Watch, start: _Memory
) -> None:
    """What comes back to row 0 of each layer is the same, whatever the other rows hold and whatever comes back to them."""
    batches = [inputs, *(tuple(changed(t, scale) for t in inputs) for scale in SCALES)]
    passes = (
        _cotangents(module, batch, watch, start, partial(_others_times, scale), columns)
        for scale, batch in zip((1.0, *SCALES), batches, strict=True)
    )
    if not _all_alike(passes):
        raise MixesSamples(
            "the gradient of one record changes with the other records on its way back through the module, so clipping it does "
            "not bound their influence: a hook or an autograd function works on the whole batch (g / g.norm(), say). Let it "
            "treat each row by itself, or take it out."
        )


def _check_losses(
    module: nn.Module, inputs: tuple[Tensor, ...], returned: dict[int, list[Any]], watch: _Watch, start: _Memory
) -> None:
    """Where the module returns a loss of the whole batch: the gradient of row 0 is the same, whatever the other rows hold."""
    single = lambda t: isinstance(t, Tensor) and t.requires_grad and t.ndim == 0  # noqa: E731
    places = [k for k, column in enumerate(zip(*returned.values())) if all(map(single, column))]
    if not places:
        return
    unused = tuple(_all_unused(t) for t in inputs)
    batches = (inputs, *(tuple(changed(t, scale) for t in inputs) for scale in SCALES), unused)
    if not _all_alike(_cotangents(module, batch, watch, start, lambda leaf: leaf, places) for batch in batches):
        raise MixesSamples(
            "the module returns a loss of the whole batch in which the gradient of one record changes with the others: a mean "
            "over the labels that are not ignored divides by how many the batch has, say. Let it return the logits, and take "
            "the mean over each record by itself; a term that is not trained on is returned detached."
        )


def _others_times(scale: float, leaf: Tensor) -> Tensor:
    return leaf[0].sum() + scale * leaf[1:].sum()


def _cotangents(
    module: nn.Module, batch: tuple[Tensor, ...], watch: _Watch, start: _Memory, end: Callable[[Tensor], Tensor], places: list[int]
) -> list[Tensor]:
    """What comes back to row 0 of each layer in a pass from the start, from what ``end`` makes of some of the outputs."""
    _restore(module, start)
    torch.manual_seed(0)
    watch.seen = []
    leaves = tree_leaves(module(*batch))
    torch.stack([end(leaves[k].float()) for k in places]).sum().backward()
    return watch.seen


def _all_alike(passes: Iterable[list[Tensor]]) -> bool:
    own, *others = passes
    return all(all(map(_alike, own, other)) for other in others)


def _all_unused(t: Tensor) -> Tensor:
    """Integers of which some are negative are no indices, but labels of which some are ignored: here all but those of row 0."""
    if t.is_floating_point() or t.is_complex() or not t.numel() or t.dtype == torch.bool or int(t.min()) >= 0:
        return t
    other = t.clone()
    other[1:] = t.min()
    return other


def _alike(a: Tensor, b: Tensor, of_largest: float = 1e-4) -> bool:
    """Up to a share of the largest entry."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    a, b = a.double(), b.double()
    return torch.allclose(a, b, rtol=max(1e-3, of_largest), atol=of_largest * float(a.abs().max()), equal_nan=True)


def _by_row(leaves: dict[int, list[Any]]) -> list[int]:
    """Of what a module returned for each number of rows: where the differentiable tensors with one row for each record are."""
    like = lambda t, rows: isinstance(t, Tensor) and t.requires_grad and t.ndim > 0 and len(t) == rows  # noqa: E731
    found = enumerate(zip(*leaves.values()))
    return [k for k, column in found if all(like(t, rows) for t, rows in zip(column, leaves, strict=True))]


class _Watch(Tape):
    """A tape that objects to cotangents outside the row that was asked for; where none was, it keeps those of row 0."""

    row: int | None = 0
    rows_expected = 0
    seen: list[Tensor]

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
            self.seen.append(by_row[0].detach().double())
            return
        others = by_row.detach().reshape(len(by_row), -1).abs().amax(1) if by_row[0].numel() else by_row.new_zeros(by_row.shape[0])
        others[self.row] = 0
        if bool((others > 0).any()):
            raise MixesSamples(
                "a layer sees the records in another order than the model's output (rows are sorted, flipped or shuffled "
                "inside the model), so gradients of different records would be clipped as one. Keep the order of rows; layers that "
                "see time-major sequences want batch_first=False."
            )


def _unlike(inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Two numbers of rows that are no other size of the inputs: a layer that sees tokens first must not seem to see records."""
    sizes = {size for t in inputs for size in t.shape[1:]}
    few, more = itertools.islice((n for n in itertools.count(5, 2) if n not in sizes), 2)
    return few, more


def _more_rows(t: Tensor, rows: int) -> Tensor:
    if not t.ndim:
        return t
    return (
        torch.randn(rows, *t.shape[1:], dtype=t.dtype, device=t.device)
        if t.is_floating_point()
        else t[torch.arange(rows) % len(t)]
    )


def check_padding(module: nn.Module, alone: Tensor, beside: Tensor) -> None:
    """Raise if a record's output changes with the length to which the batch pads it. Both hold the record alone, [1, …]."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with _untouched(module), torch.no_grad():
            outs = [module(t) for t in (alone, beside)]
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


def changed(t: Tensor, scale: float = 2.0) -> Tensor:
    """The same tensor with every row but the first replaced by other values of the same kind."""
    if not t.ndim or t.shape[0] < 2:
        return t
    other = t.clone()
    other[1:] = t[:1] if not t.is_floating_point() else scale * torch.randn_like(t[1:]) + scale / 2
    return other


def _trace(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[_Call]:
    """(path, module, row 0 of its inputs, row 0 of its outputs) in order of completion, innermost first."""
    seen: list[_Call] = []
    rows = inputs[0].shape[0]
    hooks = []
    for path, m in module.named_modules():

        def note(m: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
            seen.append((path, m, _first_rows((args, kwargs), rows), _first_rows(out, rows)))

        hooks.append(m.register_forward_hook(note, with_kwargs=True))
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _first_rows(tree: Any, rows: int) -> list[Tensor]:
    return [t[0].clone() for t in tree_leaves(tree) if isinstance(t, Tensor) and t.ndim and t.shape[0] == rows]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


class _Memory(NamedTuple):
    """All that a module remembers and its state_dict() shows."""

    tensors: dict[str, Tensor]
    #: what modules of the user's own keep beside parameters and buffers, by path
    extra: dict[str, Any]


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[_Memory]:
    """Parameters, buffers and random states are as they were afterwards."""
    extra = {path: copy.deepcopy(m.get_extra_state()) for path, m in _with_extra_state(module)}
    start = _Memory({name: t.detach().clone() for name, t in _own(module)}, extra)
    devices = list({b.device for b in module.parameters() if b.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield start
        finally:
            _restore(module, start)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, m) for path, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a module remembers, in numbers under a name."""
    yield from _own(module)
    for path, m in _with_extra_state(module):
        for k, leaf in enumerate(tree_leaves(m.get_extra_state())):
            if isinstance(leaf, (Tensor, int, float)):
                yield f"{path}.extra_state[{k}]".removeprefix("."), torch.as_tensor(leaf)


def _restore(module: nn.Module, start: _Memory) -> None:
    for name, t in _own(module):
        if name in start.tensors and t.shape == start.tensors[name].shape:
            t.data.copy_(start.tensors[name])
        elif name in start.tensors:
            t.data = start.tensors[name].clone()
    for path, m in _with_extra_state(module):
        m.set_extra_state(copy.deepcopy(start.extra[path]))
