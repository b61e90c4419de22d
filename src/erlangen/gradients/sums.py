"""Squared norms and weighted sums of rows, in float32 at least and without forgetting small terms."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from erlangen.gradients.kernels import usable
from erlangen.gradients.precision import accumulate_dtype

# Entries of a gradient whose squares are added up by one call; a GPU has 2048 accumulators for them, a CPU sixteen.
LONGEST_RUN = {"cpu": 512, "cuda": 1 << 18}
#: columns of a matrix that are worth a thread
FEWEST_COLUMNS = 512


def memory_order(t: Tensor, first: int = 1) -> list[int]:
    """The axes from ``first`` on, outermost in memory first: flattened in this order they need no copy."""
    strides = t.stride()
    return sorted(range(first, t.ndim), key=lambda axis: -strides[axis])


def squared_norms(g: Tensor) -> Tensor:
    """‖g_i‖² for each row of [n, …], accumulated in at least float32, and in runs: one long sum would forget all terms that
    are below half its rounding error, one after another (7 % of ten million entries)."""
    precise = accumulate_dtype(g)
    if g.numel() == 0:
        return g.new_zeros(g.shape[0], dtype=precise)
    order = memory_order(g)
    flat = g.permute(0, *order).flatten(1) if order else g[:, None]
    run, entries = LONGEST_RUN.get(g.device.type, 512), flat.shape[1]
    whole = entries - entries % run
    if whole <= run:
        return torch.linalg.vector_norm(flat, dim=1, dtype=precise).square()
    runs = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, run)), dim=2, dtype=precise).square().sum(1)
    return runs if whole == entries else runs + torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=precise).square()


def over_views(per_row: Tensor, views: int) -> Tensor:
    """Σ over the views of each owner, whose rows follow each other: [rows, …] → [owners, …]"""
    return per_row.unflatten(0, (-1, views)).sum(1) if views > 1 else per_row


def skips_zero_weights(*tensors: Tensor) -> bool:
    """Whether `row_sum` takes the kernel that never reads a row of weight zero."""
    return usable(*tensors) and all(t.dtype != torch.float64 for t in tensors)


def row_sum(w: Tensor, g: Tensor) -> Tensor:
    """Σ_i w_i g_i of a matrix [n, d], products and sums in float32 at least."""
    if skips_zero_weights(w, g) and g.numel():
        from erlangen.gradients.kernels.row_sum import row_sum as kernel

        return kernel(w, g.contiguous())
    if g.dtype == accumulate_dtype(g):
        return _by_columns(w.to(g.dtype), g)
    if g.is_cuda and g.dtype == torch.bfloat16 and _has_wide_product() and len(g):
        return torch.mm(_three_parts(w), g, out_dtype=torch.float32).sum(0)
    return w @ g.to(w.dtype)


def _by_columns(w: Tensor, g: Tensor) -> Tensor:
    """w @ g. A CPU's product of a vector and a matrix keeps to one thread: every thread gets columns of its own."""
    blocks = min(torch.get_num_threads(), g.shape[1] // FEWEST_COLUMNS) if g.device.type == "cpu" else 1
    if blocks < 2 or not len(g):
        return w @ g
    width = g.shape[1] // blocks
    whole = g[:, : blocks * width].unflatten(1, (blocks, width)).transpose(0, 1)
    total = torch.bmm(w.expand(blocks, 1, -1), whole).flatten()
    return total if len(total) == g.shape[1] else torch.cat([total, w @ g[:, len(total) :]])


def _three_parts(w: Tensor) -> Tensor:
    """A float32 vector as the exact sum of three bfloat16 ones, [3, n]."""
    parts, rest = [], w.float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)


@functools.cache
def _has_wide_product() -> bool:
    """Whether this PyTorch multiplies bfloat16 matrices into a float32 result."""
    try:
        one = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError, NotImplementedError):
        return False
