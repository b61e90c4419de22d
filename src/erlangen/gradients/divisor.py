"""How many rows there are, on the way back: what returns to one record is the same whatever a mean divides by, and whoever
is left out before it or behind it.

Under Poisson sampling the number of rows B is as private as who they are. A mean sends g/B back, and the tape multiplies by B
again; what is not proportional on the way (a hook that clamps, rounds or leaves out small gradients, an autograd function with a
threshold) leaves something of B in every record's gradient. So does what multiplies or divides by the length of the batch itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.draws import Drawn
from erlangen.gradients.fewer import MixesSamples
from erlangen.gradients.trace import alike_if_padded, as_padded

#: powers of two: multiplying by them rounds nothing
SMALL, LARGE = 2.0**-20, 2.0**20
#: of the largest gradient: what is less may be the rounding of what cancels, and that of c/5 is another than that of c/7
NOISE = 1e-5
#: how far entries of a gradient may be apart, as a share of its largest
APART = 1e-4
#: and how far gradients in their length: nine rows and eleven, the most alike that are tried, make a difference of a sixth
NEAR = 0.1
#: the same, and how far gradients may be apart, where a module takes products in 16 bits: other kernels for other shapes round
#: otherwise, and a factor of 5 or of 7 is more than that
NOISE_16, APART_16 = 1e-2, 0.05
#: below it float32 may have lost bits on the way
LEAST = 1e-30

THRESHOLD = (
    "what comes back {where} is not in proportion to what the loss sends: something on the way looks at how large it is "
    "(a hook that clamps or rounds gradients, or leaves out small ones; an autograd function with a threshold), and a mean divides "
    "it by how many records were drawn, so that one record more changes the gradients of all others. Let the loss add up "
    "(reduction='sum') and say loss_reduction='sum', or take it out."
)
_COUNTED = (
    "what comes back through the module to one record changes with how many records the batch has: a hook or an autograd function "
    "multiplies or divides by its length (g * len(g), or a BackwardClip for another reduction than that of the loss), so that one "
    "record more changes the gradients of all others. Let it use a constant, or take it out."
)

#: by layer, of each of its calls, the last first: what came back, [rows, …]
Cotangents = dict[Hashable, list[Tensor]]
#: in a pass over these rows of a batch, the ends being multiplied by a number
Back = Callable[[range, float], Cotangents]


def check_divisor(module: nn.Module, back: Back, few: int, more: int, reduction: str, devices: set[torch.device]) -> None:
    """Raise unless each row gets back the same of a loss that is reduced so, over ``more`` rows and over the first or the last
    ``few`` of them, small or large. Each: who is spared may be a matter of place, or of what a record is like."""
    if reduction == "mean":
        check_proportion(module, partial(back, range(few)))
    over = lambda rows: float(len(rows)) if reduction == "mean" else 1.0  # noqa: E731
    whole, parts = range(more), (range(few), range(more - few, more))
    for scale in (1.0, LARGE):  # a bound is seen where it is exceeded
        try:
            with Drawn(1.0, devices):  # masks of other shapes are others
                every, *some = (back(rows, scale / over(rows)) for rows in (whole, *parts))
        except Exception:  # it draws indices, or is for batches of one size: its own call will tell
            return
        noise, apart = (NOISE_16, APART_16) if _in_16_bits(every) else (NOISE, APART)
        least = noise * over(whole) * max((_size(t.nan_to_num(0, 0, 0)) for calls in every.values() for t in calls), default=0.0)
        for rows, own in zip(parts, some, strict=True):
            for k, row in enumerate(rows):
                same = partial(_near, least=least) if row else partial(_alike, share=noise, apart=apart)
                if not same(_of_row(k, own), _of_row(row, every), over(rows), over(whole)):
                    raise MixesSamples(_COUNTED)


def check_proportion(module: nn.Module, back: Callable[[float], Cotangents]) -> None:
    """Raise unless each row gets back as many times more as the ends are multiplied by."""
    own = back(1.0)
    for scale in () if _in_16_bits(own) else (SMALL, LARGE):  # those are refused at the step
        with _told(module, scale):
            other = back(scale)
        rows = max((len(t) for calls in own.values() for t in calls), default=0)
        if not all(_alike(_of_row(k, own), _of_row(k, other), 1.0, 1.0 / scale) for k in range(rows)):
            raise MixesSamples(THRESHOLD.format(where="through the module"))


@contextlib.contextmanager
def _told(module: nn.Module, scale: float) -> Iterator[None]:
    """Inside, layers that know what a mean divides by know what this loss is multiplied by: their bounds go along."""
    knowing: list[Any] = [m for m in module.modules() if getattr(m, "undoes_means", False)]
    for m in knowing:
        m.bound *= scale
    try:
        yield
    finally:
        for m in knowing:
            m.bound /= scale


def _in_16_bits(cotangents: Cotangents) -> bool:
    return any(t.element_size() == 2 for calls in cotangents.values() for t in calls)


def counts(cotangents: Cotangents) -> dict[Hashable, int]:
    return {layer: len(calls) for layer, calls in cotangents.items()}


def own_calls(of_row: Cotangents) -> Cotangents:
    """The calls from which anything comes back to a row."""
    own = {layer: [t for t in calls if bool(t.any())] for layer, calls in of_row.items()}
    return {layer: calls for layer, calls in own.items() if calls}


def _of_row(row: int, cotangents: Cotangents) -> Cotangents:
    return {layer: [t[row].double() for t in calls] for layer, calls in cotangents.items()}


def _paired(a: Cotangents, b: Cotangents, times_a: float, times_b: float) -> list[tuple[Tensor, Tensor]] | None:
    """What came back to a row in two passes, call by call; None if from another number of calls."""
    if counts(a) != counts(b):  # some were for other rows alone: nothing comes back to this one from those
        a, b = own_calls(a), own_calls(b)
    if counts(a) != counts(b):
        return None
    pairs = [pair for layer, calls in a.items() for pair in zip(calls, b[layer], strict=True)]
    return [(one * times_a, other * times_b) for one, other in pairs]


def _alike(
    a: Cotangents, b: Cotangents, times_a: float, times_b: float, share: float = 0.0, apart: float = APART
) -> bool:
    """Of one row, where it is no less than a share of the largest of all layers, neither too large nor too small for float32."""
    pairs = _paired(a, b, times_a, times_b)
    if pairs is None:
        return False
    sizes = [max(map(_size, pair)) for pair in pairs]
    least = share * max((size for size in sizes if size < math.inf), default=0.0)
    least = max(least, LEAST * max(times_a, times_b, 1.0))
    return all(alike_if_padded(*pair, apart) for pair, size in zip(pairs, sizes, strict=True) if least <= size < math.inf)


def _near(a: Cotangents, b: Cotangents, times_a: float, times_b: float, least: float) -> bool:
    """Of one row, in the length of what came back. Entry by entry one in a million differs wherever rounding changes with the
    shape, by all it is: where a ReLU was about to open."""
    pairs = _paired(a, b, times_a, times_b)
    if pairs is None:
        return False
    seen = [pair for pair in pairs if least <= max(map(_size, pair)) < math.inf]
    return all(float((one - other).norm()) <= NEAR * float(one.norm()) for one, other in map(as_padded, seen))


def _size(t: Tensor) -> float:
    """The largest entry, ∞ if one is not finite."""
    size = float(t.abs().max()) if t.numel() else 0.0
    return size if math.isfinite(size) else math.inf
