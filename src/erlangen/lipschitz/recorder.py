"""Private training without per-sample gradients: one ordinary backward pass, gated at the logits.

The network's forward pass runs on fresh leaves that share the parameters' memory, so that the gradient of exactly this
pass lands on them and nothing else does. The *gate* behind the logits sees each row's cotangent, [rows, classes], and
 * undoes the mean over rows,
 * sets rows that are not finite to zero and cuts the others to the loss's declared constant L: with the declared loss
   that changes nothing, with any other loss the sensitivity still holds,
 * multiplies by the row's share of its owner (1/views, 1/rows of a patient, 0 for padding).
Backpropagation is linear in the cotangent, so what arrives at the parameters is Σ over owners of the mean over their
rows: at most Δ_d from each owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from erlangen.gradients.attach import PrivateForward, attach, detach
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.lipschitz.backward_clip import AdaptiveBackwardClip, BackwardClip, RowScale, limited


class SummedGradients(PerSampleGradients):
    """Σ over owners, and no owner's own: all that a mechanism with certified sensitivities needs."""

    def __init__(self, sums: dict[str, Tensor], owners: int) -> None:
        super().__init__({}, owners)
        self.sums = sums


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, open_gate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.open_gate = open_gate
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.open_gate(cotangent), None


class Recorder(Tape):
    """Stands in for a tape. ``mode`` says how the sum is formed behind the gate:

    ``"autograd"`` takes the gradients of an ordinary backward pass. Under bfloat16 autocast those sums over the batch
    would be rounded to 8 bits, and one record could flip the rounding of all: ``"pieces"`` lets the tape keep what the
    gradients are products of and sums the products in float32. ``"backstop"`` hands the pieces on, for their norms.
    """

    _clips: tuple[AdaptiveBackwardClip, ...] = ()
    _cutting: tuple[BackwardClip, ...] = ()
    _frozen: tuple[str, ...] = ()

    def __init__(
        self, plain: Tape, loss_constant: float, before_forward: Callable[[], None], mode: str = "autograd"
    ) -> None:
        strategy = "norms-first" if mode == "pieces" else plain.strategy
        super().__init__(plain.parameters, "sum", strategy, plain.batch_first)
        self._ignored, self.metric, self.private_sizes = plain._ignored, plain.metric, plain.private_sizes
        self.reduction, self.loss_constant = plain.loss_reduction, loss_constant
        self.before_forward, self.mode = before_forward, mode

    def clear(self) -> None:
        super().clear()
        self._leaves: dict[str, Tensor] | None = None
        self._owners = 0
        for clip in self._clips:
            clip.pending = 0.0

    # -- the module ---------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module) -> None:
        self._clips = tuple(m for m in module.modules() if isinstance(m, AdaptiveBackwardClip))
        self._cutting = tuple(m for m in module.modules() if isinstance(m, BackwardClip))
        self._frozen = tuple(n for n, _ in module.named_parameters() if n not in self.parameters)
        if self.mode != "autograd":
            attach(module, self)
        module.__dict__["forward"] = PrivateForward(module, _recorded, self)

    def detach(self, module: nn.Module) -> None:
        detach(module)
        for m in module.modules():
            if isinstance(m, BackwardClip):
                m.rows = None

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's own forward pass, recorded."""
        self.before_forward()
        rows = RowMap.regular(x.shape[0]) if self.rows is None else self.rows
        if rows.rows != x.shape[0]:
            raise RuntimeError(f"the network got {x.shape[0]} rows where {rows.rows} were announced")
        share = _share(rows, x)
        for clip in self._cutting:
            clip.rows = RowScale(share, share)
        leaves: dict[str, Tensor] = {}
        if self.mode != "autograd":
            logits = type(module).forward(module, x)
        else:
            leaves = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
            frozen = {name: module.get_parameter(name).detach() for name in self._frozen}
            logits = functional_call(_Body(module), {f"inner.{n}": p for n, p in (frozen | leaves).items()}, (x,))
        return _Gate.apply(logits, lambda c: self._pass(c, rows.owners, share, leaves))

    def _pass(self, cotangent: Tensor, owners: int, share: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        if self._leaves is not None:
            raise RuntimeError(
                "two forward passes took part in one step: each record may contribute once. Give all rows to one call "
                "of the network (views of a record belong into its row map), and call backward() once per step."
            )
        self._begin()
        self._refuse_rounded(cotangent, self.reduction)
        self._leaves, self._owners = leaves, owners
        precise = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))  # rounded once, at the end
        whole = precise * cotangent.shape[0] if self.reduction == "mean" else precise
        shares = share.to(precise.dtype).view(-1, *[1] * (cotangent.ndim - 1))
        return (limited(whole, self.loss_constant)[0] * shares).to(cotangent.dtype)

    def _rows_of(self, count: int, device: torch.device) -> RowMap:
        """Rows of one owner are summed: the gate has applied their shares."""
        if self._seen is None:
            rows = RowMap.regular(count) if self.rows is None else self.rows.to(device)
            self._seen = replace(rows, reduce="sum")
        return super()._rows_of(count, device)

    def gradients(self) -> PerSampleGradients:
        if self.complete:
            for clip in self._clips:
                clip.total, clip.pending = clip.total + clip.pending, 0.0
        if self.mode == "autograd" and self.complete:
            assert self._leaves is not None
            zero = torch.zeros_like
            sums = {n: zero(leaf) if leaf.grad is None else leaf.grad for n, leaf in self._leaves.items()}
            result: PerSampleGradients = SummedGradients(sums, self._owners)
            self.clear()
            self.rows = None
            return result
        pieces = super().gradients()
        if self.mode == "backstop":
            return pieces
        ones = torch.ones(pieces.owners, device=next(iter(self.parameters.values())).device)
        return SummedGradients(pieces.weighted_sum(dict.fromkeys(pieces.names, ones)), pieces.owners)


class _Body(nn.Module):
    """The module's own computation, without the shadowed ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return type(self.inner).forward(self.inner, x)


def _recorded(module: nn.Module, recorder: Recorder, x: Tensor) -> Tensor:
    """The rule of the whole network, in the form that `PrivateForward` calls."""
    return recorder.run(module, x)


def _share(rows: RowMap, like: Tensor) -> Tensor:
    """Each row's part of its owner; at most 1 in total per owner."""
    if rows.reduce != "mean":
        raise ValueError(
            f"rows of one owner are combined by {rows.reduce!r}: the sum over a record's rows has no bound that is "
            "known in advance. Use reduce='mean'."
        )
    floats = torch.empty(0, dtype=torch.float32, device=like.device)
    if not rows.is_regular:
        return rows.row_factor(floats)
    share = torch.full((rows.rows,), rows.mean_factor(), device=like.device)
    if rows.valid is not None:
        share = share * rows.valid.to(like.device).repeat_interleave(rows.views)
    return share
