"""Does a loss mix samples? By experiment, on a few answers: the gradient of one row, whatever the others are and were."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from erlangen.gradients.divisor import LARGE, SMALL, THRESHOLD
from erlangen.gradients.fewer import MixesSamples
from erlangen.gradients.trace import same
from erlangen.gradients.variants import SCALES, changed
from erlangen.streams import seed_layers

#: of a batch in which a loss is looked at
MOST_NUMBERS = 1 << 21
#: of a loss, answers and labels: (a row, answers and labels in which it is as it was)
Variants = Callable[[Any, Tensor, Any], Iterator[tuple[int, tuple[Tensor, Any]]]]
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
    _require_own_gradients(criterion, outputs, targets, reduction, _variants)


def _gradient(criterion: Callable[[Any, Any], Tensor], reduction: str) -> Callable[..., Tensor]:
    """Of each row's own loss, by its answer; ``times`` is what the loss is multiplied by on the way."""

    def gradient(logits: Tensor, labels: Any, times: float = 1.0) -> Tensor:
        logits = logits.detach().clone().requires_grad_()
        scale = (len(logits) if reduction == "mean" else 1) / times
        with torch.random.fork_rng(devices=[]):
            seed_layers(0)
            return scale * torch.autograd.grad(times * criterion(logits, labels), logits)[0]

    return gradient


def _require_own_gradients(criterion: Any, outputs: Tensor, targets: Any, reduction: str, variants: Variants) -> None:
    """Raise if the gradient of a row is another one in any of the ``variants`` of a batch, in which that row is as it was."""
    gradient = _gradient(_copied(criterion), reduction)
    own = gradient(outputs, targets)

    def moves(row: int, batch: tuple[Tensor, Any]) -> bool:
        try:
            return not same([own[row]], [gradient(*batch)[row]])
        except Exception:  # a label that this loss has no class for
            return False

    moved = [moves(row, batch) for row, batch in variants(criterion, outputs, targets)]
    if not same([own], [gradient(outputs, targets)]):
        raise MixesSamples(
            f"the loss {type(criterion).__name__} remembers the batches before: the gradient of one record changes with those of "
            "earlier steps, which no noise covers (running class weights, a centre, a memory). Use a loss of this batch alone."
        )
    if reduction == "mean" and not all(same([own], [gradient(outputs, targets, times)]) for times in (SMALL, LARGE)):
        raise MixesSamples(THRESHOLD.format(where=f"through the loss {type(criterion).__name__}"))
    if any(moved):
        raise MixesSamples(
            f"the loss {type(criterion).__name__} mixes samples: the gradient of one record changes with the others (class "
            "weights and ignored labels under 'mean' do that: they divide by what the batch holds; so does a choice of its hardest "
            "records; a wrong loss_reduction shows in the same way). Let it add up (reduction='sum') and pass loss_reduction='sum'"
            ", or take a mean of per-sample terms."
        )


def check_some_loss(
    criterion: Callable[[Any, Any], Tensor], answers: Any, left: Sequence[Any], reduction: str, rows: int = 0
) -> bool:
    """`check_loss` with what the loss most likely gets: of a module's answers all, or one; of what a batch has left, one part.

    The first pair on which it can be computed decides; False where there is none. With more ``rows`` than there are answers it is
    looked at in a batch of so many, too: the k hardest records of three are all of them.
    """
    criterion, guessed = _copied(criterion), not isinstance(answers, Tensor) or len(left) != 1
    if guessed:  # not on a GPU, which never recovers from a label that has no class
        answers, left = tree_map(lambda t: t.cpu() if isinstance(t, Tensor) else t, (answers, list(left)))
        criterion = criterion.cpu() if isinstance(criterion, nn.Module) else criterion
    pairs: list[tuple[Any, Tensor]] = [(criterion, t) for t in _rows(answers)]
    if pairs and not isinstance(answers, Tensor):
        pairs.insert(0, (_Joined(criterion, answers), _side_by_side(answers)))
    parts = [*left, *(leaf for part in left if not isinstance(part, Tensor) for leaf in tree_leaves(part))]
    for loss, given in pairs:
        for targets in parts:
            if _computes(loss, given, targets, guessed):
                check_loss(loss, given, targets, reduction)
                _check_more(loss, given, targets, reduction, rows)
                return True
    return False


def _check_more(criterion: Callable[[Any, Any], Tensor], outputs: Tensor, targets: Any, reduction: str, rows: int) -> None:
    """In a batch of as many rows, as far as they are not too large: answers near those that there are, with their labels."""
    count = len(outputs)
    rows = min(rows, MOST_NUMBERS // max(outputs[0].numel(), 1))
    if rows <= count or not outputs.is_floating_point():
        return
    again = torch.arange(rows, device=outputs.device) % count
    with torch.random.fork_rng(devices=[]):
        seed_layers(0)
        more = outputs[again] + outputs.abs().mean() * torch.randn(rows, *outputs.shape[1:], device="cpu").to(outputs)
    by_row = lambda t: isinstance(t, Tensor) and t.ndim and len(t) == count  # noqa: E731
    labels = tree_map(lambda t: t[again.to(t.device)] if by_row(t) else t, targets)
    if not _computes(criterion, more, labels, False):
        return
    length = _gradient(_copied(criterion), reduction)(more, labels).reshape(rows, -1).norm(dim=1)
    ends = (int(length.argmax()), int(length.argmin()))  # whoever is chosen now, and whoever is not

    def variants(criterion: Any, outputs: Tensor, targets: Any) -> Iterator[tuple[int, tuple[Tensor, Any]]]:
        return ((row, (changed(outputs, scale, row), targets)) for row in ends for scale in SCALES)

    _require_own_gradients(criterion, more, labels, reduction, variants)


def refuse_by_type(criterion: Any, reduction: str) -> None:
    """Of a loss that could not be computed: raise if it divides by what the labels of a batch weigh, or by how many count."""
    check_loss(criterion, torch.zeros(1), None, reduction)
    if reduction != "mean" or not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    weight, ignored = criterion.weight, criterion.ignore_index
    weighted = weight is not None and bool((weight != weight[0]).any())
    what = "class weights" if weighted else f"ignore_index={ignored}"
    if weighted or ignored != UNUSED:
        raise MixesSamples(
            f"the loss {type(criterion).__name__} has {what} and takes a mean: it "
            "divides by what the labels of the batch weigh together, so the gradient of one record changes with the others. "
            "Let it add up (reduction='sum') and pass loss_reduction='sum'."
        )


def _copied(criterion: Any) -> Any:
    """What it remembers of made-up answers is not for the training to find."""
    try:
        return copy.deepcopy(criterion)
    except Exception:
        return criterion


def _computes(criterion: Callable[[Any, Any], Tensor], answers: Tensor, targets: Any, guessed: bool) -> bool:
    if isinstance(targets, Tensor) and (not targets.ndim or len(targets) != len(answers)):
        return False
    answers = answers.detach().clone().requires_grad_()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            if guessed:  # shapes that are stretched to fit are a wrong one
                warnings.simplefilter("error")
            loss = _copied(criterion)(answers, targets)
        return loss.ndim == 0 and loss.requires_grad
    except Exception:  # it wants other answers or labels
        return False


def _rows(answers: Any) -> list[Tensor]:
    return [t for t in tree_leaves(answers) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim and len(t) > 1]


def _side_by_side(answers: Any) -> Tensor:
    return torch.cat([t.reshape(len(t), -1) for t in _rows(answers)], 1)


class _Joined(nn.Module):
    """A loss of several answers, as one of a matrix that holds all of them side by side."""

    def __init__(self, criterion: Callable[[Any, Any], Tensor], answers: Any) -> None:
        super().__init__()
        self.criterion, self.answers = criterion, answers

    def forward(self, matrix: Tensor, targets: Any) -> Tensor:
        rows = _rows(self.answers)
        columns = iter(zip(rows, matrix.split([t[0].numel() for t in rows], 1), strict=True))
        leaves, form = tree_flatten(self.answers)
        for k, leaf in enumerate(leaves):
            if _rows(leaf):
                t, part = next(columns)
                leaves[k] = part.reshape(len(matrix), *t.shape[1:]).to(t.dtype)
        return self.criterion(tree_unflatten(leaves, form), targets)


def _variants(criterion: Any, outputs: Tensor, targets: Any) -> Iterator[tuple[int, tuple[Tensor, Any]]]:
    """(a row, answers and labels in which it is as it was): the first and the last, since a loss may run along the batch."""
    labelled = isinstance(targets, Tensor) and targets.ndim and len(targets) == len(outputs)
    by_row = lambda t: isinstance(t, Tensor) and t.ndim and len(t) == len(outputs)  # noqa: E731
    for row, fewer in ((0, slice(None, -1)), (-1, slice(1, None))):
        for scale in SCALES:
            yield row, (changed(outputs, scale, row % len(outputs)), targets)
        if labelled:
            yield row, (outputs[fewer], targets[fewer])
            for label in _labels(criterion, outputs, targets):
                yield row, (outputs, _all_but(row, targets, label))
        else:  # labels of several parts: those of another record for all others
            yield row, (outputs[fewer], tree_map(lambda t: t[fewer] if by_row(t) else t, targets))  # noqa: B023
            for k in range(len(outputs)):
                yield row, (outputs, tree_map(lambda t: _all_but(row, t, t[k]) if by_row(t) else t, targets))  # noqa: B023


def _all_but(row: int, t: Tensor, value: Any) -> Tensor:
    other = t.clone()
    other[:] = value
    other[row] = t[row]
    return other


def _labels(criterion: Any, outputs: Tensor, targets: Tensor) -> list[Any]:
    """What the labels of all others may be."""
    if targets.is_floating_point():  # how many answers are positive, say
        return [0.0, 1.0]
    classes = min(outputs.shape[1], 16) if outputs.ndim > 1 else 2
    labels = torch.unique(torch.cat([targets.flatten(), torch.arange(classes).to(targets)])).tolist()
    ignored = getattr(criterion, "ignore_index", None)
    return [*labels, ignored] if isinstance(ignored, int) and (ignored != UNUSED or targets.ndim > 1) else labels
