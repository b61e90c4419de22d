"""Made-up rows in the form of the data, and how the user's loop most likely calls the module with them.

A batch ``(x, …, y)`` is tried as ``module(x, …)`` with all but the last, then with fewer and fewer, down to ``module(x)``; a
mapping as ``module(**batch)`` with the names that ``forward`` takes, then without its labels, then with those it must have.
Labels are handed over where ``forward`` has a name for them. Every form that can be called is checked: an argument that may
be left out is one that may be given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from erlangen.gradients.memory import attributes_untouched, untouched
from erlangen.gradients.variants import can_take
from erlangen.sampling.labels import unlabelled
from erlangen.sampling.records import fetched

ROWS = 3

#: names of arguments that take the labels
LABELS = ("y", "label", "labels", "target", "targets")


@dataclass(frozen=True)
class Form:
    """One way to call the module: ``call(*inputs)``. ``targets`` is what is left of a batch, real labels among it."""

    call: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if isinstance(self.call, ByName):
            return ", ".join(self.call.names)
        return "the first part of a batch" if len(self.inputs) == 1 else f"the first {len(self.inputs)} parts of a batch"


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
    # from end to end: where records are sorted by their labels, the first few have the same
    places = [i * (len(dataset) - 1) // (ROWS - 1) for i in range(ROWS)]
    without = unlabelled(dataset)
    if without is not None:  # so that it shows what a loss makes of them
        places[1] = without
    batch = loader.collate_fn(fetched(dataset, places))
    device = next(module.parameters()).device
    made: list[Form] = []
    for call, tensors, left in _ways(module, batch):
        inputs = tuple(torch.randn_like(t) if t.is_floating_point() else t for t in tensors)
        targets = tuple(tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, left))
        made.append(Form(call, tuple(t.to(device) for t in inputs), targets))
        if len(made) == 1 and isinstance(call, type(module)):
            _refuse_precision(module, made[0].inputs)
    return made


def fitting(tried: Sequence[Form]) -> list[tuple[Form, Any]]:
    """Every form in which the module can be called, and what it returns; the error of the last if there is none."""
    found: list[tuple[Form, Any]] = []
    error: Exception | None = None
    for form in tried:
        try:
            with torch.no_grad(), untouched(form.call), attributes_untouched(form.call):  # what it does once is seen later
                found.append((form, form.call(*(t.clone() for t in form.inputs))))
        except Exception as e:  # it wants other arguments; the user's own call will tell
            error = e
    if error is not None and not found:
        raise error
    return found


#: what is called, with which tensors, and what is left of the batch
_Way = tuple[nn.Module, list[Tensor], list[Any]]


def _ways(module: nn.Module, batch: Any) -> list[_Way]:
    """The fullest first; of those that ``forward`` has no arguments for, one for the sake of its error."""
    ways = list(_by_name(module, batch) if isinstance(batch, Mapping) else _by_position(module, batch))
    return [way for way in ways if _binds(module, way)] or ways[-1:]


def _by_name(module: nn.Module, batch: Mapping[Any, Any]) -> Iterator[_Way]:
    taken = inspect.signature(module.forward).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given = [name for name in batch if isinstance(name, str) and (free or name in taken)]
    required = [name for name in given if name in taken and taken[name].default is inspect.Parameter.empty]
    seen: list[list[str]] = [[]]
    for names in (given, [name for name in given if name not in LABELS], required):
        if names not in seen and _all_tensors(batch[name] for name in names):
            seen.append(names)
            left = sorted((name for name in batch if name not in names), key=lambda name: name not in LABELS)
            yield ByName(module, names), [batch[name] for name in names], [batch[name] for name in left]


def _by_position(module: nn.Module, batch: Any) -> Iterator[_Way]:
    parts = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, (list, tuple)) else []
    names = list(inspect.signature(module.forward).parameters)
    labelled = 1 < len(parts) <= len(names) and names[len(parts) - 1] in LABELS
    for count in range(len(parts) if labelled else max(len(parts) - 1, 1), 0, -1):
        if _all_tensors(parts[:count]) or (count == 1 and parts and isinstance(parts[0], Tensor)):
            yield module, parts[:count], parts[count:]


def _binds(module: nn.Module, way: _Way) -> bool:
    """Has ``forward`` arguments for these?"""
    call, tensors, _ = way
    try:
        if isinstance(call, ByName):
            inspect.signature(module.forward).bind(**dict(zip(call.names, tensors, strict=True)))
        else:
            inspect.signature(module.forward).bind(*tensors)
    except TypeError:
        return False
    return True


def _all_tensors(values: Any) -> bool:
    return all(isinstance(t, Tensor) and t.ndim and len(t) == ROWS for t in values)


def _refuse_precision(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Data of another precision than the parameters', unless the module converts it by itself."""
    first, floating = inputs[0], [p.dtype for p in module.parameters() if p.is_floating_point()]
    other = first.is_floating_point() and first.dtype not in floating and not torch.is_autocast_enabled()
    if other and not can_take(module, inputs):
        raise TypeError(
            f"the data is {first.dtype} but the module's parameters are {floating[0]}: convert one, e.g. x.to({floating[0]})"
        )
