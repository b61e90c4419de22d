"""Does a loss mix samples? By experiment, on a few answers: the gradient of one row, whatever the others are and were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from erlangen.gradients.independence import SCALES, MixesSamples, changed
from erlangen.gradients.trace import same

#: PyTorch's own ignore_index, which nobody chose: no class of a whole record has this label, but pixels and tokens may
UNUSED = -100


def check_loss(criterion: Callable[[Tensor, Any], Tensor], outputs: Tensor, targets: Any, reduction: str) -> None:
    """Raise if a loss mixes samples, or if its reduction is not the one that was announced."""
    declared = getattr(criterion, "reduction", reduction)
    if declared != reduction:
        raise ValueError(
            f"loss_reduction is {reduction!r} but the criterion reduces by {declared!r}; pass loss_reduction={declared!r}"
            if declared in ("mean", "sum")
            else f"the criterion's reduction is {declared!r}; use 'mean' or 'sum'"
        )
    if outputs.shape[0] < 2 or not outputs.is_floating_point():
        return

    with contextlib.suppress(Exception):  # what it remembers of made-up answers is not for the training to find
        criterion = copy.deepcopy(criterion)

    def gradient(logits: Tensor, labels: Any) -> Tensor:
        logits = logits.detach().clone().requires_grad_()
        scale = len(logits) if reduction == "mean" else 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return scale * torch.autograd.grad(criterion(logits, labels), logits)[0]

    own = gradient(outputs, targets)
    if not same([own], [gradient(outputs, targets)]):
        raise MixesSamples(
            f"the loss {type(criterion).__name__} remembers the batches before: the gradient of one record changes with those of "
            "earlier steps, which no noise covers (running class weights, a centre, a memory). Use a loss of this batch alone."
        )
    if not all(same([own[row]], [gradient(*batch)[row]]) for row, batch in _variants(criterion, outputs, targets)):
        raise MixesSamples(
            f"the loss {type(criterion).__name__} mixes samples: the gradient of one record changes with the others (class "
            "weights and ignored labels under 'mean' do that: they divide by what the batch holds; a wrong loss_reduction "
            "shows in the same way). Let it add up (reduction='sum') and pass loss_reduction='sum', or take a mean of "
            "per-sample terms."
        )


def _variants(criterion: Any, outputs: Tensor, targets: Any) -> Iterator[tuple[int, tuple[Tensor, Any]]]:
    """(a row, answers and labels in which it is as it was): the first and the last, since a loss may run along the batch."""
    labelled = isinstance(targets, Tensor) and targets.ndim and len(targets) == len(outputs)
    for row, fewer in ((0, slice(None, -1)), (-1, slice(1, None))):
        for scale in SCALES:
            yield row, (changed(outputs, scale, row % len(outputs)), targets)
        if labelled:
            yield row, (outputs[fewer], targets[fewer])
            for label in _labels(criterion, outputs, targets):
                other = torch.full_like(targets, label)
                other[row] = targets[row]
                yield row, (outputs, other)


def _labels(criterion: Any, outputs: Tensor, targets: Tensor) -> list[Any]:
    """What the labels of all others may be."""
    if targets.is_floating_point():  # how many answers are positive, say
        return [0.0, 1.0]
    classes = min(outputs.shape[1], 16) if outputs.ndim > 1 else 2
    labels = torch.unique(torch.cat([targets.flatten(), torch.arange(classes).to(targets)])).tolist()
    ignored = getattr(criterion, "ignore_index", None)
    return [*labels, ignored] if isinstance(ignored, int) and (ignored != UNUSED or targets.ndim > 1) else labels
