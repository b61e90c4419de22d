"""Rounding in norms that come from Gram matrices, counted so that they are never below the norm of what is summed.

A squared norm Σ_{t,s} ⟨a_t, a_s⟩⟨d_t, d_s⟩ can come out too small when huge terms cancel, and a clip that trusts it would let
too much through. With M = Σ_t ‖a_t‖‖d_t‖ every addition errs by at most ε/2 of M², in the norm, or of M, in the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erlangen.gradients.tracing import as_on_gpu

#: products that one entry of a Gram matrix adds at a time
GRAM_RUN = 512


def gram(t: Tensor) -> Tensor:
    """t tᵀ of [..., T, n], in runs: n products one after another in float32 would err by n roundings."""
    first, *rest = t.split(GRAM_RUN, -1)
    total = first @ first.mT
    for part in rest:
        total += part @ part.mT
    return total


def additions(entries: int) -> int:
    """Roundings that an entry of `gram` has seen at most, in whatever order a product adds."""
    return min(entries, GRAM_RUN) + -(-entries // GRAM_RUN)


def outward(value: Tensor, magnitude: Tensor, units: float, terms: float | Tensor) -> Tensor:
    """A bound of the squared norm of what is summed, from a ``value`` whose terms have total magnitude M² = ``magnitude``.

    ``units`` are the roundings in the value (ε/2 each, a tenth more for their products). They need not be random: a product
    that adds 4608 equal entries errs by a hundred epsilons, always the same way. The weighted sum adds ``terms`` of total
    magnitude M, and its norm errs by so many ε/2 of that: (√value + kM)².
    """
    eps = torch.finfo(value.dtype).eps
    true = value.clamp(min=0) + (3 + 0.55 * units) * eps * magnitude
    return (true.sqrt() + 0.55 * (terms + 2) * eps * magnitude.sqrt()).square()


def hidden(own_a: Tensor, own_d: Tensor, entries: int) -> Tensor:
    """What vanishes from ‖Σ_t d_t ⊗ a_t‖² where squares of small entries do, beside a huge one whose cotangent is zero. From
    ‖a_t‖² and ‖d_t‖², [n, T] each: entries below 2√tiny hide at most δ = T·2√tiny·√entries·(max‖a_t‖ + max‖d_t‖) of the
    sum, and (‖g‖ + δ)² ≤ (1 + ε)‖g‖² + (1 + 1/ε)δ²; the first part is in `outward`."""
    if not own_a.numel():
        return own_a.new_zeros(len(own_a))
    info, tokens = torch.finfo(own_a.dtype), own_a.shape[1]
    return (16 * tokens**2 * entries * info.tiny / info.eps) * (own_a.amax(1) + own_d.amax(1))


def weighed(d: Tensor, a: Tensor, w: Tensor, views: int = 1) -> tuple[Tensor, Tensor]:
    """Factors whose product of owner i is w_i·d_i⊗a_i. Their rows are ``views`` to an owner; what an owner of weight 0 holds is
    not looked at (0·NaN is still NaN: put it out first where it may be there).

    Usually they are w·d and a. But w·d can overflow, or be left with a bit or two: where w·|d|_max is not between 1e-20 and
    1e20, they are d/|d|_max·√ and a·√ with √ = √(w·|d|_max), which stay in range, because w·|a|_max·|d|_max is at most 2⁵⁰
    bounds (`hidden`). Every owner decides for itself.
    """
    flat = d.reshape(len(w), -1)
    size = torch.maximum(flat.amax(1), -flat.amin(1))
    each = lambda t: t if views == 1 else t.repeat_interleave(views)  # noqa: E731
    row = lambda t, like: each(t.to(like.dtype)).view(-1, *[1] * (like.ndim - 1))  # noqa: E731
    if not as_on_gpu(d) and _all_within(w.abs().to(size.dtype) * size):  # the usual case; what vanishes or overflows here is not
        return d * row(w, d), a
    reach = w.abs().double() * size.double()
    usual = ~((size > 0) & (w != 0)) | ((reach >= 1e-20) & (reach <= 1e20))
    if not as_on_gpu(d) and bool(usual.all()):
        return d * row(w, d), a
    root = reach.sqrt()
    left = d / row(torch.where(usual, 1.0, size), d)
    left.mul_(row(torch.where(usual, w.double(), torch.copysign(root, w.double())), d))
    return left, a * row(torch.where(usual, 1.0, root), a)


def _all_within(reach: Tensor) -> bool:
    """Whether all are between 1e-20 and 1e20; NaN is not."""
    if not len(reach):
        return True
    least, most = reach.aminmax()
    return float(least) >= 1e-20 and float(most) <= 1e20
