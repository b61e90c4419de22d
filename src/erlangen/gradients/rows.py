"""Whose gradient is it? The map from the rows of a physical batch to the owners whose privacy is protected.

One map serves augmentation views, padding, virtual batches and groups of records (patients): every row has an *owner*;
rows of the same owner are averaged (or summed) *before* clipping; owner −1 is padding and contributes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sent(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait until the device has done what it was given before."""
    if device.type != "cuda" or t.is_cuda:
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)  # pinned memory is not used again before the copy is over


@dataclass(frozen=True)
class RowMap:
    """Rows → owners of one physical batch.

    A *regular* map (``owner is None``) is owner-major with ``views`` rows each: the fast paths fold the views into the
    inner dimension of a matrix product. Any other layout names the owner of each row.
    """

    owners: int
    views: int = 1
    owner: Tensor | None = None
    reduce: str = "mean"
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce is {self.reduce!r}; rows of one owner are combined by 'mean' or 'sum'")
        if self.owners < 0 or self.views < 1:
            raise ValueError(f"a row map needs owners ≥ 0 and views ≥ 1, got {self.owners} and {self.views}")
        if self.valid is not None and tuple(self.valid.shape) != (self.owners,):
            raise ValueError(
                f"valid has shape {tuple(self.valid.shape)}; expected ({self.owners},), one flag per owner"
            )

    @classmethod
    def regular(cls, owners: int, views: int = 1, valid: Tensor | None = None, reduce: str = "mean") -> RowMap:
        """`views` consecutive rows per owner; owners whose ``valid`` flag is off are padding."""
        return cls(owners, views, None, reduce, valid)

    @classmethod
    def of(cls, owner: Tensor, reduce: str = "mean") -> RowMap:
        """Any layout: ``owner[r]`` is an arbitrary label of row r, −1 for padding. Labels are renumbered 0…n−1."""
        owner = torch.as_tensor(owner, dtype=torch.long)
        if owner.ndim != 1:
            raise ValueError(f"owner has shape {tuple(owner.shape)}; expected one label per row")
        if (owner < -1).any():
            raise ValueError(f"owner label {int(owner.min())} is negative; use labels ≥ 0, or −1 for a padding row")
        labels, index = torch.unique(owner, return_inverse=True)
        padding = int(labels.numel() > 0 and labels[0] == -1)
        return cls(labels.numel() - padding, 1, index - padding, reduce)

    @property
    def is_regular(self) -> bool:
        return self.owner is None

    @property
    def rows(self) -> int:
        return self.owners * self.views if self.owner is None else self.owner.numel()

    def to(self, device: torch.device) -> RowMap:
        move = lambda t: None if t is None else sent(t, device)  # noqa: E731
        return RowMap(self.owners, self.views, move(self.owner), self.reduce, move(self.valid))

    def mean_factor(self) -> float:
        """What a regular map multiplies a sum over views by."""
        return 1.0 / self.views if self.reduce == "mean" else 1.0

    def row_factor(self, like: Tensor) -> Tensor:
        """Per-row factor of an irregular map: 1/(rows of the owner) for means, 0 for padding."""
        assert self.owner is not None
        owner = self.owner.to(like.device)
        present = owner >= 0
        if self.reduce == "sum":
            return present.to(like.dtype)
        # bincount and owner[present] would make the host wait for the device, in every layer
        count = owner.new_zeros(self.owners + 1).index_add_(0, owner + 1, torch.ones_like(owner))
        return torch.where(present, 1.0 / count.clamp(min=1).to(like.dtype)[owner + 1], 0.0)

    def scaled(self, per_row: Tensor) -> Tensor:
        """Rows [rows, …] of an irregular map times their factors; padding is exactly zero, whatever it held."""
        factor = self.row_factor(per_row).view(-1, *[1] * (per_row.ndim - 1))
        return torch.where(factor == 0, 0.0, per_row * factor)

    def sum_rows(self, per_row: Tensor) -> Tensor:
        """Σ over the rows of each owner: [rows, …] → [owners, …]. Padding rows are dropped."""
        if self.owner is None:
            return per_row.unflatten(0, (self.owners, self.views)).sum(1) if self.views > 1 else per_row
        owner = self.owner.to(per_row.device)
        out = per_row.new_zeros((self.owners + 1, *per_row.shape[1:]))
        return out.index_add_(0, owner + 1, per_row)[1:]
