"""How many rows there are, on the way back: what returns to one record is the same whatever a mean divides by.

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
from erlangen.gradients.trace import alike_if_padded

#: powers of two: multiplying by them rounds nothing
SMALL, LARGE = 2.0**-20, 2.0**20
#: of the largest gradient: what is less may be the rounding of what cancels, and that of c/5 is another than that of c/7
NOISE = 1e-5
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

#: by layer, of each of its calls, the last first: by row, what came back
Cotangents = dict[Hashable, list[dict[int, Tensor]]]
#: in a pass over so many rows, the ends being multiplied by a number
Back = Callable[[int, float], Cotangents]


def check_divisor(module: nn.Module, back: Back, few: int, more: int, reduction: str, devices: set[torch.device]) -> None:
    """Raise unless row 0 gets back the same of a loss that is reduced so, over ``few`` rows and over ``more``, small or large."""
    if reduction == "mean":
        check_proportion(module, partial(back, few))
    over = lambda rows: float(rows) if reduction == "mean" else 1.0  # noqa: E731
    for scale in (1.0, LARGE):  # a bound is seen where it is exceeded
        try:
            with Drawn(1.0, devices):  # masks of other shapes are others
                own, other = (back(rows, scale / over(rows)) for rows in (few, more))
        except Exception:  # it draws indices, or is for batches of one size: its own call will tell
            return
        precision = (NOISE_16, APART_16) if _in_16_bits(own) else (NOISE,)
        if not _alike(own, other, over(few), over(more), *precision):
            raise MixesSamples(_COUNTED)


def check_proportion(module: nn.Module, back: Callable[[float], Cotangents]) -> None:
    """Raise unless row 0 gets back as many times more as the ends are multiplied by."""
    own = back(1.0)
    for scale in () if _in_16_bits(own) else (SMALL, LARGE):  # those are refused at the step
        with _told(module, scale):
            other = back(scale)
        if not _alike(own, other, 1.0, 1.0 / scale):
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
    return any(t.element_size() == 2 for calls in cotangents.values() for rows in calls for t in rows.values())


def counts(cotangents: Cotangents) -> dict[Hashable, int]:
    return {layer: len(calls) for layer, calls in cotangents.items()}


def own_calls(cotangents: Cotangents) -> Cotangents:
    """The calls from which anything comes back to row 0."""
    own = {layer: [rows for rows in calls if bool(rows[0].any())] for layer, calls in cotangents.items()}
    return {layer: calls for layer, calls in own.items() if calls}


def _alike(
    a: Cotangents, b: Cotangents, times_a: float, times_b: float, share: float = 0.0, apart: float = 1e-4
) -> bool:
    """Of row 0, where it is no less than a share of the largest of all layers, and neither too large nor too small for float32."""
    if counts(a) != counts(b):  # some were for other rows alone: nothing comes back to row 0 from those
        a, b = own_calls(a), own_calls(b)
    if counts(a) != counts(b):
        return False
    called = [pair for layer, calls in a.items() for pair in zip(calls, b[layer], strict=True)]
    rows = [(one[0].double() * times_a, other[0].double() * times_b) for one, other in called]
    sizes = [[float(t.abs().max()) if t.numel() else 0.0 for t in pair] for pair in rows]
    finite = [all(map(math.isfinite, pair)) for pair in sizes]
    least = share * max((max(pair) for pair, held in zip(sizes, finite, strict=True) if held), default=0.0)
    least = max(least, LEAST * max(times_a, times_b, 1.0))
    pairs = zip(rows, sizes, finite, strict=True)
    return all(alike_if_padded(*pair, apart) for pair, size, held in pairs if held and max(size) >= least)
