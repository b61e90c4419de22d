"""Does any module mix samples? Known ones by type, unknown ones by experiment.

The experiment: run a batch, change everything but row 0, run again with the same random numbers. A module whose inputs
agree in row 0 but whose outputs do not has looked at other rows; per-sample clipping would not bound their influence.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.tape import Tape

#: how large the other rows are made: a maximum over the batch is seen only if they are larger, a minimum if smaller
SCALES = (2.0, 50.0, 0.02)

#: PyTorch's own ignore_index, which nobody chose: no class of a whole record has this label, but pixels and tokens may
UNUSED = -100

_ORDER_UNSEEN = (
    "whether every layer sees the records in the order of the batch was not checked: the module returns no tensor with one row "
    "for each of them. If rows are sorted, flipped or shuffled inside the module, the guarantee does not hold."
)

_STATEFUL_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class MixesSamples(ValueError):
    """A module whose output for one record depends on others."""


def known_problems(module: nn.Module) -> list[str]:
    """Modules that are known to mix samples or to keep un-noised statistics, with the cure."""
    problems = []
    for path, m in module.named_modules():
        where = f"{type(m).__name__} at {path!r}" if path else f"{type(m).__name__} (the module itself)"
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, _STATEFUL_NORMS):
            problems.append(f"{where} mixes samples; use GroupNorm, or call erlangen.fix(model)")
        elif isinstance(m, _STATEFUL_NORMS) and m.track_running_stats:
            problems.append(f"{where} keeps running statistics of private records; set track_running_stats=False, "
                            "or call erlangen.fix(model)")  # fmt: skip
        elif isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq):
            problems.append(
                f"{where} uses max_norm or scale_grad_by_freq, which depend on the whole batch; turn them off"
            )
        elif isinstance(m, nn.modules.lazy.LazyModuleMixin) and m.has_uninitialized_params():  # type: ignore[misc]
            problems.append(f"{where} has no parameters yet; run one forward pass before making it private")
    return problems


def fix(module: nn.Module) -> nn.Module:
    """The module with every known problem replaced: BatchNorm → GroupNorm, running statistics off. In place."""
    replacement = _replacement(module)
    if replacement is not None:
        return replacement
    for name, child in module.named_children():
        setattr(module, name, fix(child))
    return module


def _replacement(m: nn.Module) -> nn.Module | None:
    if isinstance(m, _STATEFUL_NORMS):
        new: nn.Module = type(m)(m.num_features, m.eps, affine=m.affine, track_running_stats=False)
    elif isinstance(m, nn.modules.batchnorm._BatchNorm):
        groups = max(g for g in range(1, min(32, m.num_features) + 1) if m.num_features % g == 0)
        new = nn.GroupNorm(groups, m.num_features, m.eps, affine=m.affine)
    elif isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq):
        m.max_norm, m.scale_grad_by_freq = None, False
        return m
    else:
        return None
    if m.affine:
        new.weight, new.bias = m.weight, m.bias
    return new.train(m.training)


def check_independence(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise `MixesSamples` if, in training or evaluation mode, a module mixes rows, reorders them, or keeps statistics."""
    modes = {m: m.training for m in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            with _untouched(module):
                _check_outputs(module, inputs)
                if training:
                    _check_rows(module, inputs)
    finally:
        for m, training in modes.items():
            m.training = training


def _where(path: str, m: nn.Module) -> str:
    return f"{type(m).__name__} at {path!r}" if path else f"{type(m).__name__} (the module itself)"


def _check_outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Row 0 of every output depends on row 0 of the inputs alone, and no buffer on any of them."""
    start = {name: b.clone() for name, b in module.named_buffers()}
    first = _trace(module, inputs)
    kept = {name: b.clone() for name, b in module.named_buffers()}
    for scale in SCALES:
        _restore(module, start)
        second = _trace(module, tuple(_changed(t, scale) for t in inputs))
        for (path, m, in_a, out_a), (_, _, in_b, out_b) in zip(first, second, strict=False):
            if _same(in_a, in_b) and not _same(out_a, out_b):
                raise MixesSamples(
                    f"{_where(path, m)} mixes samples: its output for one record changes with the other records of the "
                    "batch, so clipping one record's gradient does not bound its influence. Make it treat rows "
                    "independently (GroupNorm or LayerNorm in place of batch statistics), or call erlangen.fix(model)."
                )
        for name, b in module.named_buffers():
            if not _same([b], [kept[name]]):
                raise MixesSamples(
                    f"the buffer {name!r} is updated from the data: it would be released with the weights, without noise. "
                    "Drop the running statistics (GroupNorm needs none), or compute them on public data."
                )


def _check_rows(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Backwards: the gradient of one output row reaches each layer through that row alone."""
    from erlangen.gradients.attach import attach, detach, is_attached

    if is_attached(module):
        return
    watch = _Watch({n: p for n, p in module.named_parameters() if p.requires_grad})
    attach(module, watch)
    try:
        with torch.enable_grad():
            outputs = {rows: module(*(_more_rows(t, rows) for t in inputs)) for rows in (5, 7)}
            for (rows, found), asked in zip(_by_row(outputs).items(), (range(5), range(1)), strict=True):
                if not found:
                    warnings.warn(_ORDER_UNSEEN, stacklevel=2)
                    return
                for row in asked:
                    watch.row, watch.rows_expected = row, rows
                    torch.stack([out[row].float().sum() for out in found]).sum().backward(retain_graph=True)
    finally:
        detach(module)


def _by_row(outputs: dict[int, Any]) -> dict[int, list[Tensor]]:
    """From what a module returned for each number of rows: the differentiable tensors with one row for each record."""
    from torch.utils._pytree import tree_leaves

    leaves = {rows: tree_leaves(out) for rows, out in outputs.items()}
    like = lambda t, rows: isinstance(t, Tensor) and t.requires_grad and t.ndim > 0 and len(t) == rows  # noqa: E731
    kept = [all(like(t, rows) for t, rows in zip(column, leaves, strict=True)) for column in zip(*leaves.values())]
    return {rows: [t for t, keep in zip(found, kept) if keep] for rows, found in leaves.items()}


class _Watch(Tape):
    """A tape that keeps nothing and objects to cotangents outside the row that was asked for."""

    row, rows_expected = 0, 0

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
        others = by_row.detach().flatten(1).abs().amax(1) if by_row[0].numel() else by_row.new_zeros(by_row.shape[0])
        others[self.row] = 0
        if bool((others > 0).any()):
            raise MixesSamples(
                "a layer sees the records in another order than the model's output (rows are sorted, flipped or shuffled "
                "inside the model), so gradients of different records would be clipped as one. Keep the order of rows."
            )


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
    if not _same([outs[0][common]], [outs[1][common]]):
        raise MixesSamples(
            "records have different lengths, and the output for one changes with the length to which its batch is padded: a long "
            "record moves the gradients of all others. Pad to one fixed length in the data set, or let the module ignore padding "
            "by itself; if your loop hands it a mask, check with that and pass check=False."
        )


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

    def gradient(logits: Tensor, labels: Any) -> Tensor:
        logits = logits.detach().clone().requires_grad_()
        scale = len(logits) if reduction == "mean" else 1
        return scale * torch.autograd.grad(criterion(logits, labels), logits)[0][:1]

    own = gradient(outputs, targets)
    variants = [gradient(_changed(outputs, scale), targets) for scale in SCALES]
    if isinstance(targets, Tensor) and targets.ndim and len(targets) == len(outputs):
        variants.append(gradient(outputs[:-1], targets[:-1]))
        if not targets.is_floating_point():
            for label in torch.unique(
                torch.cat([targets.flatten(), torch.arange(min(outputs.shape[1], 16)).to(targets)])
            ):
                other = targets.clone()
                other[1:] = label
                variants.append(gradient(outputs, other))
            ignored = getattr(criterion, "ignore_index", None)
            if isinstance(ignored, int) and (ignored != UNUSED or targets.ndim > 1):
                other = targets.clone()
                other[1:] = ignored
                variants.append(gradient(outputs, other))
    if not all(_same([own], [v]) for v in variants):
        raise MixesSamples(
            f"the loss {type(criterion).__name__} mixes samples: the gradient of one record changes with the others (class "
            "weights and ignored labels under 'mean' do that: they divide by what the batch holds; a wrong loss_reduction "
            "shows in the same way). Use a mean or a sum of per-sample terms with fixed weights."
        )


def _changed(t: Tensor, scale: float = 2.0) -> Tensor:
    """The same tensor with every row but the first replaced by other values of the same kind."""
    if not t.ndim or t.shape[0] < 2:
        return t
    other = t.clone()
    other[1:] = t[:1] if not t.is_floating_point() else scale * torch.randn_like(t[1:]) + scale / 2
    return other


def _trace(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[str, nn.Module, list[Tensor], list[Tensor]]]:
    """(path, module, row 0 of its inputs, row 0 of its outputs) in order of completion, innermost first."""
    seen: list[tuple[str, nn.Module, list[Tensor], list[Tensor]]] = []
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
    from torch.utils._pytree import tree_leaves

    return [t[0].clone() for t in tree_leaves(tree) if isinstance(t, Tensor) and t.ndim and t.shape[0] == rows]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Buffers and random states are as they were afterwards."""
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    devices = list({b.device for b in module.parameters() if b.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            _restore(module, buffers)


def _restore(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, b in module.named_buffers():
        b.data.copy_(buffers[name])
