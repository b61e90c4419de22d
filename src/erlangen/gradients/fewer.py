"""One record less: what a module computes for the others, and all that it remembers, stays the same.

How many records were drawn is as private as who they are. Where random numbers are drawn an experiment says which (`draws`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from erlangen.gradients.draws import Drawn, along
from erlangen.gradients.memory import (
    Memory,
    attributes_untouched,
    draw_again,
    modes_untouched,
    remembered,
    restore,
    untouched,
)
from erlangen.gradients.problems import where
from erlangen.gradients.trace import Trace, own_copies, paired, same, trace

#: the first and the last record, by their place among those that are watched, and the batch without the one at the other end
ENDS = ((0, 0, slice(None, -1)), (1, -1, slice(1, None)))


class MixesSamples(ValueError):
    """A module whose output for one record depends on others."""


def watched_rows(inputs: tuple[Tensor, ...]) -> list[int]:
    rows = inputs[0].shape[0]
    return list(dict.fromkeys((0, rows - 1, rows // 2)))


def check_state(module: nn.Module, expected: dict[str, Tensor], what: str) -> None:
    """Whatever a module remembers after a pass is what it remembers after any other."""
    for name, t in remembered(module):
        before = expected.get(name)
        if before is None or (not torch.equal(t, before) and not same([t], [before])):
            kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise MixesSamples(
                f"the {kind} {name!r} {what}: it would be released with the weights, without noise. "
                "Drop the running statistics (GroupNorm needs none), or compute them on public data."
            )


def check_fewer(
    module: nn.Module, inputs: tuple[Tensor, ...], first: Trace, after: dict[str, Tensor], start: Memory
) -> None:
    """The ends of every output, and all that is remembered, are the same with one record less: how many were drawn is as private
    as who they are, and so is who came before whom."""
    for place, row, part in ENDS:
        restore(module, start)
        try:
            second = trace(module, _some(inputs, part), [row])
        except Exception:  # of a module for batches of one size: the first Poisson batch will tell
            return
        check_state(module, after, "counts the records of each batch")
        if second.random and (module.training or row):  # other shapes draw other numbers, and a later row always does
            _check_drawn(module, inputs, start)
            return
        _require_alike_in_fewer(first, second, place)


def check_parts(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Whatever a module remembers is the same after one pass and after two: of how many parts a batch is made depends on who was
    drawn. Weights are moved before, because what follows them (power iteration) may have arrived."""
    with modes_untouched(module), untouched(module), attributes_untouched(module):
        module.train()
        draw_again()
        module(*own_copies(inputs))  # what is made once is there
        with torch.no_grad():
            for p in filter(torch.is_floating_point, module.parameters()):
                p.add_(torch.randn_like(p), alpha=0.1)
        after: list[dict[str, Tensor]] = []
        for _ in range(2):
            draw_again()
            module(*own_copies(inputs))
            after.append({name: t.detach().clone() for name, t in remembered(module)})
    once, twice = after
    counted = next((name for name, t in twice.items() if name not in once or not _alike(t, once[name])), None)
    if counted is not None:
        raise MixesSamples(
            f"{counted!r} changes with every forward pass (a counter, power iteration in spectral_norm), and max_physical_batch "
            "cuts a batch into as many passes as who was drawn makes necessary: it would be released with the weights, without "
            "noise. Leave max_physical_batch out, so that a step is one pass, or keep nothing between passes."
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    """To the last bit; nan is nan."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _some(inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, ...]:
    rows = inputs[0].shape[0]
    return tuple(t[part] if t.ndim and len(t) == rows else t for t in inputs)


def _require_alike_in_fewer(first: Trace, second: Trace, place: int) -> None:
    culprit = next((a for a, b in paired(first, second) if not a.alike_in_fewer(b, place)), None)
    if culprit is not None:
        raise MixesSamples(
            f"{where(culprit.path, culprit.module)} mixes samples: its output for one record changes with how many records "
            "the batch has, so one more moves the gradients of all others. Let it divide by a constant, not by the length of "
            "the batch, and give no record a number by its place in it (positions count along time, dim 1)."
        )


def _check_drawn(module: nn.Module, inputs: tuple[Tensor, ...], start: Memory) -> None:
    """Where random numbers are drawn: with the same for all, one record less changes nothing, nor do others for the other records.
    A mask that is divided by what the whole batch keeps of it (DropBlock) lets every record depend on how many there are."""
    rows, watched = inputs[0].shape[0], watched_rows(inputs)
    devices = {t.device for t in inputs if t.device.type == "cuda"}

    def traced(batch: tuple[Tensor, ...], seen: list[int], drawn: Drawn) -> Trace | None:
        restore(module, start)
        try:
            with drawn:
                found = trace(module, batch, seen)
        except Exception:  # this is no number for it, or it draws indices
            return None
        return None if found.random else found

    for value in (1.0, 0.0):  # one of them is what is kept by a mask
        every = Drawn(value, devices)
        first = traced(inputs, watched, every)
        for place, row, part in ENDS:
            fewer = Drawn(value, devices)
            second = traced(_some(inputs, part), [row], fewer)
            if first is None or second is None:
                break
            _require_alike_in_fewer(first, second, place)
            apart = Drawn(value, devices, watched[place], along(every.shapes, fewer.shapes, rows))
            third = traced(inputs, [watched[place]], apart)
            pairs = paired(first, third) if third else ()
            culprit = next((a for a, b in pairs if not a.same(b, place)), None)
            if culprit is not None:
                raise MixesSamples(
                    f"{where(culprit.path, culprit.module)} mixes samples: its output for one record changes with the random "
                    "numbers that are drawn for others, so one record more moves the gradients of all. Let it divide a mask by "
                    "the share that is kept on average, not by what this batch keeps (as DropBlock does)."
                )
