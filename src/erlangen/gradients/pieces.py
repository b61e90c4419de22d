"""Per-owner gradients of one parameter, materialised or not.

A *piece* answers three questions about the gradients g_1 … g_n of one parameter: their squared norms, a weighted sum,
and (if somebody insists) the gradients themselves. `Dense` holds them; the others hold what they are products of and
never form them unless asked, so that a private step costs little more than an ordinary one.

``weight`` in `norms_squared` is the geometry: ``None`` (Euclidean), a tensor ω shaped like the parameter (norm of ω∘g),
or a function that maps materialised gradients [n, *shape], in float32 at least, to the coordinates whose norm counts. One
that is a `KernelFilter` is known to convolutions: they filter before they form anything.

Rounding. A squared norm computed from Gram matrices can come out too small when huge terms cancel, and a clip that
trusts it would let too much through. Such norms are rounded outwards by the rounding error that their own terms allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.rounding import additions, gram, hidden, outward, weighed
from erlangen.gradients.sums import memory_order, row_sum, skips_zero_weights, squared_norms
from erlangen.gradients.tracing import as_on_gpu

if TYPE_CHECKING:
    from erlangen.gradients.filtered import KernelFilter

Weight = Tensor | Callable[[Tensor], Tensor] | None

# Flops that cost as much as moving one float through a GPU's memory; only the order of magnitude matters.
FLOPS_PER_FLOAT = 300.0
CHUNK_FLOATS = {"cpu": 1 << 24, "cuda": 1 << 29}


def chunk_size(per_owner: int, like: Tensor) -> int:
    """How many owners to form at once, so that temporaries stay small."""
    return max(1, CHUNK_FLOATS.get(like.device.type, 1 << 26) // max(1, per_owner))


def apply_weight(weight: Weight, g: Tensor) -> Tensor:
    if weight is None:
        return g
    g = g.to(accumulate_dtype(g))  # coordinates in 16 bits would be too short by their rounding
    return weight(g) if callable(weight) and not isinstance(weight, Tensor) else g * weight


def unit_scale(t: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Each owner's part divided by its largest entry, and those entries: products of squares then neither underflow nor
    overflow, or a huge activation could hide behind a tiny cotangent with a measured norm of 0."""
    t = t.to(accumulate_dtype(t))
    if not t.numel():
        return t, t.new_ones(owners)
    flat = t.reshape(owners, -1)
    size = torch.maximum(flat.amax(1), -flat.amin(1))  # on a CPU 25 times as fast as the norm with p = ∞
    if not as_on_gpu(t) and bool(((size > 1e-6) & (size < 1e6)).all()):  # the usual case needs no copy
        return t, torch.ones_like(size)
    size = torch.where(size > 0, size, 1.0)
    return t / size.repeat_interleave(t.shape[0] // owners).view(-1, *[1] * (t.ndim - 1)), size


def rank_one_norms(a: Tensor, d: Tensor) -> Tensor:
    """‖d_i ⊗ a_i‖² = ‖a_i‖²‖d_i‖² of float32 rows, through float64, where none of their squares or products can vanish."""
    length_a, length_d = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (a, d))
    return (length_a * length_d).square().to(accumulate_dtype(d))


def rescaled(norms: Tensor, *sizes: Tensor) -> Tensor:
    """Squared norms of scaled operands, scaled back; through float64, where no product of float32 sizes can vanish."""
    scale = torch.ones_like(norms, dtype=torch.float64)
    for size in sizes:
        scale = scale * size.double()
    return (norms.double() * scale.square()).to(norms.dtype)


class Piece:
    """The per-owner gradients of one parameter. Subclasses implement `count`, `dense` and `weighted_sum`."""

    #: whether forming the gradients is the cheaper way for these shapes
    prefers_dense = True
    #: whether norms come without forming the gradients in the Euclidean geometry alone; in others they are formed at once
    euclidean_only = False
    #: whether `weighted_sum` never reads an owner of weight zero, so that 0·NaN cannot reach the sum
    guarded = False
    #: whether norms were measured on formed gradients. The sum is then of the very same ones: in another order of
    #: summation huge terms that cancelled in the norm leave their rounding errors, far above the clipping bound
    measured_formed = False
    #: the filter behind which these gradients are: everything that a piece answers is about what the filter leaves
    filter: KernelFilter | None = None
    #: the gradients before the filter, where they are known
    whole: Piece | None = None

    @property
    def count(self) -> int:
        raise NotImplementedError

    def dense(self) -> Tensor:
        """[n, *shape]"""
        raise NotImplementedError

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ_i w_i g_i"""
        raise NotImplementedError

    def norms_squared(self, weight: Weight = None) -> Tensor:
        """‖weight(g_i)‖², formed in chunks and forgotten."""
        self.measured_formed = True
        return torch.cat([squared_norms(apply_weight(weight, part.precise().dense())) for part in self.chunks()])

    def sum_of_formed(self, w: Tensor) -> Tensor:
        """`weighted_sum` of the gradients as `norms_squared` forms them, a chunk at a time."""
        parts = self.chunks()
        shares = w.split([part.count for part in parts])
        sums = [Dense(part.precise().dense()).weighted_sum(share) for part, share in zip(parts, shares, strict=True)]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def formed(self) -> Piece:
        """The gradients themselves, kept from now on."""
        return Dense(self.dense())

    def filtered(self, by: KernelFilter) -> Piece:
        """These gradients behind a filter, if this piece has a cheaper way than to form and to filter them."""
        return self

    def precise(self) -> Piece:
        """The same piece in the precision in which `weighted_sum` adds it up: what is measured is what is summed."""
        return self

    def chunks(self) -> list[Piece]:
        return [self]

    def zero(self, bad: Tensor) -> Piece:
        """The same piece with the owners flagged in ``bad`` contributing exactly zero."""
        return Dense(torch.where(bad.view(-1, *[1] * (self.dense().ndim - 1)), 0.0, self.dense()))

    def without(self, bad: Tensor) -> Piece:
        """`zero`, as far as these gradients have been measured: they are formed again as they were, or not at all."""
        return Without(self, bad) if self.measured_formed else self.zero(bad)


class Dense(Piece):
    """Gradients that exist as a tensor [n, *shape], with their squared norms where those are known already."""

    def __init__(self, g: Tensor, norms: Tensor | None = None):
        self.g, self.norms = g, norms

    @property
    def count(self) -> int:
        return self.g.shape[0]

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return skips_zero_weights(self.g)

    def dense(self) -> Tensor:
        return self.g

    def norms_squared(self, weight: Weight = None) -> Tensor:
        self.measured_formed = True
        known = weight is None and self.norms is not None
        return self.norms if known else squared_norms(apply_weight(weight, self.g))  # type: ignore[return-value]

    def without(self, bad: Tensor) -> Piece:
        return self.zero(bad)

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.g.is_contiguous():
            return row_sum(w, self.g.flatten(1) if self.g.ndim > 1 else self.g[:, None]).view(self.g.shape[1:])
        order = memory_order(self.g)
        g = self.g.permute(0, *order)
        total = row_sum(w, g.flatten(1) if g.ndim > 1 else g[:, None]).view(g.shape[1:])
        return total.permute([order.index(axis) for axis in range(1, self.g.ndim)])


class Outer(Piece):
    """g_i = Σ_t d_it ⊗ a_it: a linear map's weight. a is [n, T, in], d is [n, T, out]."""

    def __init__(self, a: Tensor, d: Tensor):
        self.a, self.d = a.to(d.dtype), d  # under autocast the layer saw its input in the cotangent's precision

    @property
    def count(self) -> int:
        return self.a.shape[0]

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return skips_zero_weights(self.d)

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        tokens, (inputs, outputs) = self.a.shape[1], (self.a.shape[2], self.d.shape[2])
        return not gram_is_cheaper(tokens, inputs, outputs, self.d)

    def dense(self) -> Tensor:
        return torch.einsum("nto,nti->noi", self.d, self.a)

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        precise = accumulate_dtype(self.d)  # a weight rounded to bf16 would let a contribution exceed its bound
        d, a, w = self.d.to(precise), self.a.to(precise), w.to(precise)
        if not d.numel():
            return d.new_zeros(d.shape[2], a.shape[2])
        if self.guarded:
            keep = (w != 0)[:, None, None]
            d, a = torch.where(keep, d, 0.0), torch.where(keep, a, 0.0)
        left, right = weighed(d, a, w)
        return left.flatten(0, 1).t() @ right.flatten(0, 1)

    def norms_squared(self, weight: Weight = None) -> Tensor:
        one_token = self.a.shape[1] == 1
        if weight is not None and not (isinstance(weight, Tensor) and one_token):
            return super().norms_squared(weight)
        if weight is None and not one_token and self.prefers_dense:
            return super().norms_squared(weight)
        if one_token and weight is None and self.d.dtype != torch.float64:
            return rank_one_norms(self.a[:, 0], self.d[:, 0])
        (a, size_a), (d, size_d) = unit_scale(self.a, self.count), unit_scale(self.d, self.count)
        if one_token and weight is None:
            norms = squared_norms(a) * squared_norms(d)
        elif isinstance(weight, Tensor):
            norms = ((d[:, 0].square() @ weight.to(d.dtype).square()) * a[:, 0].square()).sum(1)
            norms = outward(norms, norms, a.shape[2] + d.shape[2] + 4, 1)
        else:
            norms = gram_norms(a, d)
        return rescaled(norms, size_a, size_d)

    def precise(self) -> Piece:
        return Outer(self.a.to(accumulate_dtype(self.a)), self.d.to(accumulate_dtype(self.d)))

    def chunks(self) -> list[Piece]:
        size = chunk_size(self.a.shape[2] * self.d.shape[2], self.d)
        return [Outer(a, d) for a, d in zip(self.a.split(size), self.d.split(size), strict=True)]

    def zero(self, bad: Tensor) -> Piece:
        keep = bad.view(-1, 1, 1)
        return Outer(torch.where(keep, 0.0, self.a), torch.where(keep, 0.0, self.d))


class Lookup(Piece):
    """An embedding's gradient: row ``index[i, t]`` of g_i receives d_it."""

    prefers_dense = False

    def __init__(self, index: Tensor, d: Tensor, entries: int):
        self.index, self.d, self.entries = index, d, entries

    @property
    def count(self) -> int:
        return self.index.shape[0]

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return skips_zero_weights(self.d)

    def dense(self) -> Tensor:
        n, _, width = self.d.shape
        out = self.d.new_zeros(n, self.entries, width)
        return out.scatter_add_(1, self.index[..., None].expand_as(self.d), self.d)

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        out = self.d.new_zeros(self.entries, self.d.shape[2], dtype=accumulate_dtype(self.d))
        weighted = self.d.to(out.dtype) * w.to(out.dtype)[:, None, None]
        if self.guarded:
            weighted = torch.where((w != 0)[:, None, None], weighted, 0.0)
        return out.index_add_(0, self.index.flatten(), weighted.flatten(0, 1))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        d = self.d.to(accumulate_dtype(self.d))
        if isinstance(weight, Tensor):
            d = d * weight[self.index]
        elif weight is not None:
            return super().norms_squared(weight)
        same = (self.index[:, :, None] == self.index[:, None, :]).to(d.dtype)
        if not same.numel():
            return d.new_zeros(len(d))
        length, tokens = torch.linalg.vector_norm(d, dim=2), d.shape[1]
        met = (same @ length[..., None]).squeeze(-1)  # of all that a token is added to
        units = additions(d.shape[2]) + 2 * tokens
        return outward((same * gram(d)).sum(2).sum(1), (met * length).sum(1), units, same.sum(2).amax(1))

    def precise(self) -> Piece:
        return Lookup(self.index, self.d.to(accumulate_dtype(self.d)), self.entries)

    def chunks(self) -> list[Piece]:
        size = chunk_size(self.entries * self.d.shape[2], self.d)
        parts = zip(self.index.split(size), self.d.split(size), strict=True)
        return [Lookup(index, d, self.entries) for index, d in parts]

    def zero(self, bad: Tensor) -> Piece:
        return Lookup(self.index, torch.where(bad.view(-1, 1, 1), 0.0, self.d), self.entries)


class Without(Piece):
    """Gradients that were measured formed, with the owners flagged in ``bad`` contributing exactly zero.

    They are put out after the rest was formed as it was measured: factors with zeros in them may lie otherwise in memory,
    where products add in another order.
    """

    measured_formed = True

    def __init__(self, piece: Piece, bad: Tensor):
        self.piece, self.bad = piece, bad

    @property
    def count(self) -> int:
        return self.piece.count

    def dense(self) -> Tensor:
        return Dense(self.piece.dense()).zero(self.bad).dense()

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.sum_of_formed(w)

    def precise(self) -> Piece:
        return Without(self.piece.precise(), self.bad)

    def chunks(self) -> list[Piece]:
        parts = self.piece.chunks()
        return [Without(part, bad) for part, bad in zip(parts, self.bad.split([p.count for p in parts]), strict=True)]

    def zero(self, bad: Tensor) -> Piece:
        return Without(self.piece, self.bad | bad)


def gram_is_cheaper(tokens: int, inputs: int, outputs: int, like: Tensor) -> bool:
    """Norms by T×T Gram matrices and one more weighted product, against forming n gradients and reading them twice."""
    if tokens == 1:
        return True
    if like.is_cuda and like.dtype != accumulate_dtype(like):  # Gram matrices need float32, far from the fast units
        return tokens <= 16
    if like.device.type == "cpu":  # measured on 30 shapes; the sum's own product costs both ways the same
        return 7 * tokens**2 + 2.4 * tokens * inputs < inputs * outputs
    move = FLOPS_PER_FLOAT
    form = tokens * inputs * outputs + 3 * move * inputs * outputs
    gram = tokens**2 * (inputs + outputs) + tokens * inputs * outputs + 2 * move * tokens * (tokens + inputs)
    return gram < form


def gram_norms(a: Tensor, d: Tensor, whole: Tensor | None = None, before: float = 0.0) -> Tensor:
    """‖Σ_t d_t ⊗ a_t‖² = Σ_{t,s} ⟨a_t,a_s⟩⟨d_t,d_s⟩, rounded outwards. a: [n, T, in], d: [n, T, out].

    Where a_t has been computed from something longer, ``whole`` are the squared norms of that [n, T], and ``before`` how many
    of its roundings a_t may be away from its exact value, each time it is computed.
    """
    gram_a, gram_d = gram(a), gram(d)
    own_a, own_d = (g.diagonal(dim1=1, dim2=2).clamp(min=0) for g in (gram_a, gram_d))
    own_a = own_a if whole is None else torch.maximum(own_a, whole)
    terms, (tokens, inputs), outputs = (own_a.sqrt() * own_d.sqrt()).sum(1), a.shape[1:], d.shape[2]
    units = additions(inputs) + additions(outputs) + 2 * tokens + 2 * before
    value = outward((gram_a * gram_d).sum(2).sum(1), terms.square(), units, tokens + before)
    return value + hidden(own_a, own_d, inputs + outputs)
