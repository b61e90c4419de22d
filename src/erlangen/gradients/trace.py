"""What each module inside another was given and returned in one pass, in the rows that are watched; and when two agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.gradients.memory import draw_again


class Call(NamedTuple):
    """One call of a module, with the rows that are watched of all that it was given and of all that it returned."""

    path: str
    module: nn.Module
    given: list[Tensor]
    returned: list[Tensor]

    def same(self, other: Call, place: int) -> bool:
        """Does what was returned for a row agree with ``other``, or what was given not? ``other`` watched that row alone."""
        return not self._given_the_same(other, place) or same(*self._answers(other, place))

    def alike_in_fewer(self, other: Call, place: int) -> bool:
        """The same for batches of another length, as far as what was returned has the same parts."""
        own, others = self._answers(other, place)
        # other kernels for other shapes round otherwise, in TF32 and 16 bits by a percent: a third less is more than that
        agree = len(own) != len(others) or all(alike(a, b, 0.05) for a, b in zip(own, others, strict=True))
        return agree or not self._given_the_same(other, place)

    def _given_the_same(self, other: Call, place: int) -> bool:
        return same([t[place] for t in self.given], [t[0] for t in other.given])

    def _answers(self, other: Call, place: int) -> tuple[list[Tensor], list[Tensor]]:
        own, others = [t[place] for t in self.returned], [t[0] for t in other.returned]
        if not self.path or len(own) != len(others):
            return own, others
        # inside, what is padded to the longest record may be ignored later: what the module itself returns will tell
        pairs = [_common(a, b) for a, b in zip(own, others, strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]


class Trace(NamedTuple):
    #: in order of completion, innermost first
    calls: list[Call]
    #: whether random numbers were drawn
    random: bool


def trace(module: nn.Module, inputs: tuple[Tensor, ...], watched: list[int]) -> Trace:
    """Every call in the order of completion, innermost first, with the rows that are watched."""
    seen: list[Call] = []
    entered: list[tuple[nn.Module, list[Tensor]]] = []
    rows = inputs[0].shape[0]
    hooks = []

    # before all other hooks, and before the module can change it in place: what it made of it is its own doing
    def enter(m: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append((m, _rows_of((args, kwargs), rows, watched)))

    for path, m in module.named_modules():

        def note(m: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
            while (call := entered.pop())[0] is not m:  # those that raised, and were caught, are never left
                pass
            seen.append(Call(path, m, call[1], _rows_of(out, rows, watched)))

        hooks.append(m.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(m.register_forward_hook(note, with_kwargs=True))
    try:
        draw_again()
        before = _random_states(inputs)
        # in training as training does it: a module may keep, or mix, only where gradients are asked for
        with torch.set_grad_enabled(module.training):
            module(*own_copies(inputs))
        return Trace(seen, not all(map(torch.equal, before, _random_states(inputs))))
    finally:
        for hook in hooks:
            hook.remove()


def paired(first: Trace, second: Trace) -> Iterator[tuple[Call, Call]]:
    """The calls of each module in two passes, the first with the first, and so on: which modules are called at all, and how often,
    may depend on the records."""
    others: dict[str, list[Call]] = {}
    for call in reversed(second.calls):
        others.setdefault(call.path, []).append(call)
    return ((call, others[call.path].pop()) for call in first.calls if others.get(call.path))


def own_copies(inputs: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """For a module that may change what it is given: the next pass begins with the same."""
    return (t.clone() for t in inputs)


def _random_states(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    devices = {t.device for t in inputs if t.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, sorted(devices, key=str))]


def _rows_of(tree: Any, rows: int, watched: list[int]) -> list[Tensor]:
    return [t.detach()[watched] for t in tree_leaves(tree) if _is_rows(t, rows)]


def _is_rows(leaf: Any, rows: int) -> bool:
    """Nested tensors, in which a transformer skips padding in evaluation, have no sizes to ask for; what it returns will tell."""
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.ndim > 0 and leaf.shape[0] == rows


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    return all(
        _equal(x, y) or torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit, as nearly all are: that is seen sooner than whether they are close."""
    return a.dtype == b.dtype and torch.equal(a, b)


def alike(a: Tensor, b: Tensor, of_largest: float = 1e-4) -> bool:
    """Up to a share of the largest entry that is finite."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    if _equal(a, b):
        return True
    a, b = a.double(), b.double()
    largest = float(a.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(a, b, rtol=max(1e-3, of_largest), atol=of_largest * largest, equal_nan=True)


def alike_if_padded(a: Tensor, b: Tensor, of_largest: float = 1e-4) -> bool:
    """`alike`, where one may have more entries in some dimensions, which are zero."""
    return alike(*as_padded((a, b)), of_largest)


def as_padded(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Both as large as the larger in each dimension, with zeros behind."""
    a, b = pair
    if a.ndim != b.ndim or a.shape == b.shape:
        return pair
    sizes = [max(sides) for sides in zip(a.shape, b.shape, strict=True)]
    padded = a.new_zeros(sizes), b.new_zeros(sizes)
    for whole, part in zip(padded, pair, strict=True):
        whole[tuple(map(slice, part.shape))] = part
    return padded


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.ndim != b.ndim:
        return a, b
    part = tuple(slice(min(pair)) for pair in zip(a.shape, b.shape, strict=True))
    return a[part], b[part]
