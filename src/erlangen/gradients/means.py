"""Means whose divisor is private: what rounds them on their way back is refused.

Under Poisson sampling the number of rows B depends on every record. A mean sends c/B back; rounded to 16 bits, or in products of
fewer bits than float32, each record's gradient then moves with B by far more than rounding in float32 does: one record moves all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from erlangen.gradients.precision import few_bits, no_ten_bits, rounds_products
from erlangen.gradients.rows import RowMap

_ROUNDED_MEAN = (
    "loss_reduction is 'mean' and gradients are {how}: a mean divides by how many rows were drawn, so that one record more or "
    "less rounds the gradients of all others anew, by far more than a clipping bound in large batches. Let the loss add up "
    "(reduction='sum') and say so: loss_reduction='sum'."
)


class PrivateMeans:
    """The part of a tape that knows how cotangents are rounded."""

    loss_reduction: str
    #: whether how many rows a batch has is as private as who they are
    private_sizes: bool
    rows: RowMap | None
    _seen: RowMap | None
    #: whether the bits of cotangents were looked at once, in a batch of a size that no power of two hides
    _looked_at_bits = False
    #: how cotangents are rounded on their way back, if they are
    _rounded: str | None = None
    _exact: contextlib.ExitStack | None = None

    def _forget_rounding(self) -> None:
        self._rounded = None
        self._leave_exact()

    def _enter_exact(self, device: torch.device) -> None:
        """From here back products are those of float32: TF32, a GPU's usual way, would round c/B, too. On a CPU fewer bits are
        somebody's wish, and refused."""
        if not self.averaged or not rounds_products(device):
            return
        if device.type != "cuda":
            self._rounded = "rounded in products of fewer bits (torch.set_float32_matmul_precision is not 'highest')"
        elif self._exact is None:
            self._exact = contextlib.ExitStack()
            self._exact.enter_context(no_ten_bits())

    def _leave_exact(self) -> None:
        if self._exact is not None:
            self._exact.close()
            self._exact = None

    def __del__(self) -> None:  # a backward pass broke off, and nobody came back
        self._leave_exact()

    @property
    def averaged(self) -> bool:
        """Whether cotangents are divided by a number of rows that is private."""
        padded = self.rows is not None and self.rows.valid is not None
        return self.private_sizes and self._reduction == "mean" and not padded

    @property
    def _reduction(self) -> str:
        """Of the user's loss."""
        return self.loss_reduction

    def _refuse_rounded(self, cotangent: Tensor) -> None:
        """A 16-bit cotangent of a mean is c/B rounded to eight bits or so: it depends on B, and B on every record."""
        how = _word(cotangent.dtype) if cotangent.element_size() == 2 else self._rounded
        if how is not None and self.averaged:
            self._leave_exact()
            raise RuntimeError(_ROUNDED_MEAN.format(how=how))

    def _note_rounding(self, module: nn.Module | None, x: Tensor) -> None:
        """Autocast, or 16-bit parameters of ``module``: what goes forward here comes back in so many bits."""
        kind = x.device.type
        if not self.averaged or not torch.is_grad_enabled():
            return
        if torch.is_autocast_enabled(kind):
            self._rounded = f"rounded to {_word(torch.get_autocast_dtype(kind))} on their way (autocast)"
        for parameter in () if module is None else module.parameters():
            if parameter.element_size() == 2:
                self._rounded = f"rounded to {_word(parameter.dtype)} in {type(module).__name__}"

    def pass_frozen(self, module: nn.Module, inputs: Iterable[Any], out: Any) -> None:
        """A layer without trainable parameters takes part: cotangents that come back through it are rounded as it rounds."""
        moving = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad] if self.averaged else []
        if moving:
            self._note_rounding(module, moving[0])
            if rounds_products(moving[0].device):  # before the first tap: nobody has said otherwise yet
                self._rounded = f"rounded in products of a frozen {type(module).__name__} (TF32 or less)"
            if not self._looked_at_bits and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(self._look_at_bits)

    def _look_at_bits(self, cotangent: Tensor) -> None:
        """In one batch: whether a loss rounds what it sends back (``criterion(out.bfloat16().float(), y)``)."""
        n = cotangent.shape[0] if self._seen is None else self._seen.rows
        if self.averaged and not self._looked_at_bits and n & (n - 1) and few_bits(cotangent):
            self._leave_exact()
            raise RuntimeError(_ROUNDED_MEAN.format(how="rounded to 16 bits on their way"))

    def _have_looked(self) -> None:
        n = 0 if self._seen is None else self._seen.rows
        self._looked_at_bits |= bool(n & (n - 1))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
