"""Private training without per-sample gradients: one ordinary backward pass, gated at the logits.

The network's forward pass runs on fresh leaves that share the parameters' memory, so that the gradient of exactly this
pass lands on them and nothing else does. The *gate* behind the logits sees each row's cotangent, [rows, classes], and
 * undoes the mean over rows,
 * sets rows that are not finite to zero and cuts the others to the loss's declared constant L: with the declared loss
   that changes nothing, with any other loss of per-sample terms the sensitivity still holds,
 * multiplies by the row's share of its owner (1/views, 1/rows of a patient, 0 for padding), and by 0 where the weights are not
   as their projection left them (somebody wrote to ``.data``): then the bounds do not hold, and the release is noise alone.
Backpropagation is linear in the cotangent, so what arrives at the parameters is Σ over owners of the mean over their
rows: at most Δ_d from each owner. The gate is the only way in: what comes back to a layer by another one (a loss on features
that a layer has kept) has no bound, and is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.attach import PrivateForward, attach, detach
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import PerSampleGradients, Tape
from erlangen.lipschitz.backward_clip import AdaptiveBackwardClip, BackwardClip, RowScale, limited
from erlangen.lipschitz.places import Place, places


class SummedGradients(PerSampleGradients):
    """Σ over owners, and no owner's own: all that a mechanism with certified sensitivities needs."""

    def __init__(self, sums: dict[str, Tensor], owners: int) -> None:
        super().__init__({}, owners)
        self.sums = sums


class _Gate(torch.autograd.Function):
    """The logits, cut off from the network behind them; what comes back is handed to ``pull``. ``tie`` asks for it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tie: Tensor, pull: Callable[[Tensor], None]) -> Tensor:
        ctx.pull = pull
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.pull(cotangent)
        return None, None, None


_AROUND = (
    "a gradient reached a layer by another way than the logits: part of the loss is computed from features inside the network "
    "(that a layer has kept, say), for which no sensitivity is certified. Compute the loss from the logits alone, or train with a "
    "mechanism that clips"
)


class Recorder(Tape):
    """Stands in for a tape. ``mode`` says how the sum is formed behind the gate:

    ``"autograd"`` takes the gradients of an ordinary backward pass. Under bfloat16 autocast those sums over the batch
    would be rounded to 8 bits, and one record could flip the rounding of all: ``"pieces"`` lets the tape keep what the
    gradients are products of and sums the products in float32. ``"backstop"`` hands the pieces on, for their norms.
    """

    _clips: tuple[AdaptiveBackwardClip, ...] = ()
    _cutting: tuple[BackwardClip, ...] = ()
    _places: tuple[Place, ...] = ()
    #: whether the gate is sending back what it has cut
    _inside = False

    def __init__(
        self, plain: Tape, loss_constant: Callable[[], float], before_forward: Callable[[], Tensor],
        intact: Callable[[Tensor], Tensor], mode: str = "autograd",
    ) -> None:  # fmt: skip
        strategy = "norms-first" if mode == "pieces" else plain.strategy
        super().__init__(plain.parameters, "sum", strategy, plain.batch_first)
        self._ignored, self.metric, self.private_sizes = plain._ignored, plain.metric, plain.private_sizes
        self.reduction, self.loss_constant = plain.loss_reduction, loss_constant
        self.before_forward, self.intact, self.mode = before_forward, intact, mode

    @property
    def _reduction(self) -> str:
        return self.reduction

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
        self._places = places(module)
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
        weights = self.before_forward()
        rows = RowMap.regular(x.shape[0]) if self.rows is None else self.rows
        if rows.rows != x.shape[0]:
            raise RuntimeError(f"the network got {x.shape[0]} rows where {rows.rows} were announced")
        share = _share(rows, x)
        for clip in self._cutting:
            each = torch.full((x.shape[0],), share, device=x.device) if isinstance(share, float) else share
            clip.rows = RowScale(each, each)
        leaves: dict[str, Tensor] = {}
        if self.mode != "autograd":
            logits = type(module).forward(module, x)
        else:
            leaves = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
            for leaf in leaves.values():
                leaf.register_hook(self._require_gate)
            logits = self._on(leaves, module, x)

        ends = [logits]

        def pull(cotangent: Tensor) -> None:
            cut = self._pass(cotangent, rows.owners, share, leaves)
            cut = cut * self.intact(weights)  # finite: `limited` sees to it
            self._inside = True
            try:  # the graph is kept for whoever else comes back through it, to be told so, and is gone with its end otherwise
                torch.autograd.backward(ends.pop(), cut, retain_graph=True)
            finally:
                self._inside = False

        return _Gate.apply(logits.detach(), torch.zeros((), device=x.device, requires_grad=True), pull)

    def _require_gate(self, gradient: Tensor) -> None:
        if not self._inside:
            raise RuntimeError(_AROUND)

    def _capture(self, use: Any, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        self._require_gate(cotangent)
        super()._capture(use, saved, cotangent)

    def _capture_rows(self, per_row: Any, count: int, batch: int) -> None:
        for gradient in per_row.values():
            self._require_gate(gradient)
        super()._capture_rows(per_row, count, batch)

    def _on(self, leaves: dict[str, Tensor], module: nn.Module, x: Tensor) -> Tensor:
        """The module's own computation with other tensors in the places of its parameters; frozen ones stay constants."""
        kept = [(slots, key, slots[key]) for slots, key, _ in self._places]
        for (slots, key, name), (_, _, own) in zip(self._places, kept, strict=True):
            slots[key] = leaves[name] if name in leaves else own.detach()
        try:
            return type(module).forward(module, x)
        finally:
            for slots, key, own in kept:
                slots[key] = own

    def _pass(self, cotangent: Tensor, owners: int, share: float | Tensor, leaves: dict[str, Tensor]) -> Tensor:
        if self._leaves is not None:
            raise RuntimeError(
                "two forward passes took part in one step: each record may contribute once. Give all rows to one call "
                "of the network (views of a record belong into its row map), and call backward() once per step."
            )
        self._enter_exact(cotangent.device)
        self._begin()
        self._refuse_rounded(cotangent)
        self._leaves, self._owners = leaves, owners
        precise = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))  # rounded once, at the end
        # what a mean divided by is put back after the cut: n·limited(c, L/n) is limited(n·c, L)
        count = max(cotangent.shape[0], 1) if self.reduction == "mean" else 1
        return limited(precise, self.loss_constant() / count, share * count)[0].to(cotangent.dtype)

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


def _recorded(module: nn.Module, recorder: Recorder, x: Tensor) -> Tensor:
    """The rule of the whole network, in the form that `PrivateForward` calls."""
    return recorder.run(module, x)


def _share(rows: RowMap, like: Tensor) -> float | Tensor:
    """Each row's part of its owner (a number if it is the same for all); at most 1 in total per owner."""
    if rows.reduce != "mean":
        raise ValueError(
            f"rows of one owner are combined by {rows.reduce!r}: the sum over a record's rows has no bound that is "
            "known in advance. Use reduce='mean'."
        )
    if not rows.is_regular:
        return rows.row_factor(torch.empty(0, dtype=torch.float32, device=like.device))
    if rows.valid is None:
        return rows.mean_factor()
    return rows.mean_factor() * rows.valid.to(like.device, torch.float32).repeat_interleave(rows.views)
