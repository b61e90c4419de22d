"""Made-up rows in the form of the data, and how the user's loop most likely calls the module with them.

A batch ``(x, …, y)`` is tried as ``module(x)``, then as ``module(x, …)`` with all but the last; a mapping as
``module(**batch)`` with the names that ``forward`` takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROWS = 3


@dataclass(frozen=True)
class Form:
    """One way to call the module: ``call(*inputs)``. ``targets`` are real ones, where there are any."""

    call: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Any = None


class ByName(nn.Module):
    """A module that is called by keywords, for those who call it by position."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *tensors: Tensor) -> Any:
        return self.module(**dict(zip(self.names, tensors, strict=True)))


def forms(module: nn.Module, loader: DataLoader) -> list[Form]:
    """Every form that batches of this loader allow; none if they hold no tensors where inputs are looked for."""
    dataset: Any = loader.dataset
    batch = loader.collate_fn([dataset[i % len(dataset)] for i in range(ROWS)])
    device = next(module.parameters()).device
    made: list[Form] = []
    for call, tensors, targets in _ways(module, batch):
        if not made and isinstance(call, type(module)):
            _refuse_precision(module, tensors[0])
        inputs = tuple(torch.randn_like(t) if t.is_floating_point() else t for t in tensors)
        made.append(
            Form(call, tuple(t.to(device) for t in inputs), targets.to(device) if isinstance(targets, Tensor) else None)
        )
    return made


def fitting(tried: Sequence[Form]) -> tuple[Form, Any]:
    """The first form in which the module can be called, and what it returns; the error of the first if there is none."""
    errors: list[Exception] = []
    for form in tried:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return form, form.call(*(t.clone() for t in form.inputs))
        except Exception as error:  # it wants other arguments; the user's own call will tell
            errors.append(error)
    raise errors[0]


def _ways(module: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, list[Tensor], Any]]:
    if isinstance(batch, Tensor):
        yield module, [batch], None
    elif isinstance(batch, Mapping):
        taken = inspect.signature(module.forward).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        given = {str(name): t for name, t in batch.items() if free or name in taken}
        if given and _all_tensors(given.values()):
            yield ByName(module, list(given)), list(given.values()), None
    elif isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Tensor):
        yield module, [batch[0]], batch[1] if len(batch) > 1 else None
        if len(batch) > 2 and _all_tensors(batch[:-1]):
            yield module, list(batch[:-1]), batch[-1]


def _all_tensors(values: Any) -> bool:
    return all(isinstance(t, Tensor) and t.ndim and len(t) == ROWS for t in values)


def _refuse_precision(module: nn.Module, first: Tensor) -> None:
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    if first.is_floating_point() and first.dtype not in floating and not torch.is_autocast_enabled():
        raise TypeError(
            f"the data is {first.dtype} but the module's parameters are {floating[0]}: convert one, e.g. x.to({floating[0]})"
        )
