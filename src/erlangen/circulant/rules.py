"""Gradients of every record w.r.t. the free parameters, their norms and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from erlangen.circulant.algebra import half_weights, real_bins, signal, spectrum
from erlangen.circulant.layers import CirculantConv2d, CirculantLinear, by_frequency, linear
from erlangen.gradients.filtered import KernelFilter
from erlangen.gradients.pieces import Dense, Piece, Weight, Without, chunk_size, gram_is_cheaper
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rounding import hidden, outward
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.linear import tokens
from erlangen.gradients.sums import over_views
from erlangen.gradients.tape import Tape


class CirculantOuter(Piece):
    """g_i = Σ_t corr(d_it, x_it) per pair of blocks. x̂: [n, T, q, f], d̂: [n, T, p, f].

    ``bins`` are the frequencies that x̂ and d̂ have: all, or those that a filter keeps. What it takes away is never multiplied.
    """

    def __init__(self, x_hat: Tensor, d_hat: Tensor, block: int, bins: Sequence[int] = ()) -> None:
        self.x, self.d, self.block = x_hat, d_hat, block
        self.bins = tuple(bins) or tuple(range(block // 2 + 1))

    @property
    def count(self) -> int:
        return self.x.shape[0]

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return not gram_is_cheaper(self.x.shape[1], self.x.shape[2], self.d.shape[2], self.x)

    def filtered(self, by: KernelFilter) -> Piece:
        bins = by.mask[: self.block // 2 + 1].nonzero().flatten().tolist()
        left = CirculantOuter(_of(bins, self.x), _of(bins, self.d), self.block, bins)
        left.filter, left.whole = by, self
        return left

    def _rows(self, product: Tensor) -> Tensor:
        """Unitary spectra multiply to √b times a unitary spectrum: hence the plain inverse."""
        half = self.block // 2 + 1
        if len(self.bins) < half:
            nothing, kept = torch.zeros_like(product[..., 0]), dict(zip(self.bins, product.unbind(-1), strict=True))
            product = torch.stack([kept.get(k, nothing) for k in range(half)], -1)
        return signal(product, self.block) * math.sqrt(self.block)

    def dense(self) -> Tensor:
        return self._rows(torch.einsum("ntpf,ntqf->npqf", self.d.conj(), self.x))

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        d = (self.d.conj() * w.to(self.d.real.dtype)[:, None, None, None]).flatten(0, 1)
        product = torch.bmm(d.permute(2, 1, 0), self.x.flatten(0, 1).permute(2, 0, 1))  # [f, p, nT] @ [f, nT, q]
        return self._rows(product.permute(1, 2, 0))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not None and weight is not self.filter:
            return super().norms_squared(weight)
        norms = self._norms()
        return norms if self.filter is None else self.filter.outward(norms, self.block)

    def _norms(self) -> Tensor:
        bins = _of(self.bins, half_weights(self.block, self.x)) * self.block
        if self.x.shape[1] == 1:
            return (_energy(self.x)[:, 0] * _energy(self.d)[:, 0] * bins).sum(1) + self._hidden()
        if self.prefers_dense:
            return super().norms_squared()
        return self._gram(bins)

    def _gram(self, bins: Tensor) -> Tensor:
        """Σ_{t,s} ⟨x̂_t, x̂_s⟩⟨d̂_s, d̂_t⟩ per frequency, rounded outwards."""
        x, d = (t.permute(0, 3, 1, 2) for t in (self.x, self.d))  # [n, f, T, ·]
        terms = (x @ x.mH).real * (d @ d.mH).real + (x @ x.mH).imag * (d @ d.mH).imag
        lengths = (_energy(self.x) * _energy(self.d)).sqrt().sum(1)  # [n, f]
        (frequencies, tokens, inputs), outputs = x.shape[1:], d.shape[3]
        units, added = 2 * (inputs + outputs) + 2 * tokens + frequencies, tokens + 8 * self.block.bit_length()
        value, magnitude = ((v * bins).sum(1) for v in (terms.sum(3).sum(2), lengths.square()))
        return outward(value, magnitude, units, added) + self._hidden()

    def _hidden(self) -> Tensor:
        """What vanishes where squares of small entries do: a bin counts 2b times at most."""
        own_x, own_d = _energy(self.x).sum(2), _energy(self.d).sum(2)
        entries = 2 * self.x.shape[3] * (self.x.shape[2] + self.d.shape[2])
        return 2 * self.block * hidden(own_x, own_d, entries)

    def chunks(self) -> list[Piece]:
        size = chunk_size(2 * self.x.shape[2] * self.d.shape[2] * self.x.shape[3], self.d)
        return [self._with(x, d) for x, d in zip(self.x.split(size), self.d.split(size), strict=True)]

    def zero(self, bad: Tensor) -> Piece:
        rows = bad.view(-1, 1, 1, 1)
        return self._with(torch.where(rows, 0.0, self.x), torch.where(rows, 0.0, self.d))

    def _with(self, x: Tensor, d: Tensor) -> Piece:
        other = CirculantOuter(x, d, self.block, self.bins)
        other.filter, other.whole = self.filter, self.whole
        return other


def _of(bins: Sequence[int], t: Tensor) -> Tensor:
    """Chosen entries of the last axis; without an index that would have to come from the host."""
    return t if len(bins) == t.shape[-1] else torch.stack([t[..., k] for k in bins], -1)


def _energy(t: Tensor) -> Tensor:
    """Σ over blocks of |t|²: [n, T, blocks, f] → [n, T, f]."""
    return (t.real.square() + t.imag.square()).sum(2)


@rule(CirculantLinear)
def circulant_linear(module: CirculantLinear, tape: Tape, input: Tensor) -> Tensor:
    weight, bias, block = module.weight, module.bias, module.block_size
    x_hat = spectrum(input, block)
    out = linear(x_hat, weight.detach(), None if bias is None else bias.detach(), module).to(input.dtype)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        owners = cotangent.shape[0] // views
        d = tokens(cotangent, views)
        if weight.requires_grad:
            x = saved[0].reshape(owners, d.shape[1], *saved[0].shape[-2:])
            yield weight, CirculantOuter(x, spectrum(d, block), block)
        if bias is not None and bias.requires_grad:
            yield bias, Dense(d.sum(1))

    return tape.tap(out, (x_hat,), (weight, bias), pieces, tape.batch_dim(input))


class Pulled(Piece):
    """Per-owner gradients of another weight, pulled back to the one behind it by a linear map."""

    def __init__(self, piece: Piece, pull: Callable[[Tensor], Tensor]) -> None:
        self.piece, self.pull = piece, pull

    @property
    def count(self) -> int:
        return self.piece.count

    def dense(self) -> Tensor:
        return self.pull(self.piece.dense())

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.sum_of_formed(w) if self.measured_formed else self.pull(self.piece.weighted_sum(w))

    def chunks(self) -> list[Piece]:
        return [Pulled(part, self.pull) for part in self.piece.chunks()]

    def zero(self, bad: Tensor) -> Piece:
        return Pulled(self.piece.zero(bad), self.pull)


class Spectra(Piece):
    """Per-owner gradients of a circulant convolution's ŵ, measured where they are, by Parseval.

    ``ends`` are those of DC and Nyquist, [n, p per frequency, q, k_h, k_w]; ``middle`` those of the other frequencies, Re and
    Im beside each other: [n, p per frequency, 2q, k_h, k_w].
    """

    def __init__(self, ends: Piece, middle: Piece, module: CirculantConv2d) -> None:
        self.ends, self.middle, self.module = ends, middle, module

    @property
    def count(self) -> int:
        return self.ends.count

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return self.ends.prefers_dense or self.middle.prefers_dense

    def dense(self) -> Tensor:
        return self._together(self.ends.dense(), self.middle.dense())

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.sum_of_formed(w) if self.measured_formed else self._together(*(p.weighted_sum(w) for p in self._parts()))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not None:
            return super().norms_squared(weight)
        ends, middle = (part.norms_squared() for part in self._parts())
        return (ends + middle / 2) * self.module.block_size

    def formed(self) -> Piece:
        return self._each(lambda part: part.formed())

    def precise(self) -> Piece:
        return self._each(lambda part: part.precise())

    def chunks(self) -> list[Piece]:
        """Of gradients that are formed from now on."""
        size = max(1, min(part.chunks()[0].count for part in self._parts()))
        return [self._each(partial(owners, start=i, stop=i + size)) for i in range(0, max(self.count, 1), size)]

    def zero(self, bad: Tensor) -> Piece:
        return self._each(lambda part: part.zero(bad))

    def without(self, bad: Tensor) -> Piece:
        """Each part by itself as it was measured: in the other's chunks its products could add in another order."""
        return Without(self, bad) if self.measured_formed else self._each(lambda part: part.without(bad))

    def _parts(self) -> tuple[Piece, Piece]:
        return self.ends, self.middle

    def _each(self, change: Callable[[Piece], Piece]) -> Piece:
        return Spectra(change(self.ends), change(self.middle), self.module)

    def _together(self, ends: Tensor, middle: Tensor) -> Tensor:
        """[..., f·p, q, …] and [..., f·p, 2q, …] to the parameter's [..., p, q, b, …]."""
        p, q = self.module.weight.shape[:2]
        pairs = middle.unflatten(-4, (-1, p)).unflatten(-3, (2, q)).transpose(-5, -4)  # [..., f, 2, p, q, k_h, k_w]
        return self.module.pull_back(torch.cat([ends.unflatten(-4, (-1, p)), pairs.flatten(-6, -5)], -5))


@rule(CirculantConv2d)
def circulant_convolution(module: CirculantConv2d, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if input.dim() != 4:
        raise ValueError(
            f"CirculantConv2d got an input of shape {tuple(input.shape)}; private layers need [rows, C, H, W]"
        )
    x, geometry = module._channels(input)
    many = by_frequency(x, module.kernels(weight.detach()), geometry)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        # norms and sums from the same float32 values: rounding one of them alone could lift a term above its bound
        d = cotangent.to(accumulate_dtype(cotangent))
        seen = saved[0].to(cotangent.dtype).to(d.dtype)
        yield weight, spectra(seen, d, views, module, geometry)

    out = module._output(tape.tap(many, (x,), (weight,), pieces), None).to(input.dtype)
    if bias is None:
        return out

    def bias_pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(over_views(cotangent.flatten(2).sum(2), views))

    return tape.tap(out + bias.detach()[:, None, None], (), (bias,), bias_pieces)


def spectra(x: Tensor, d: Tensor, views: int, module: CirculantConv2d, geometry: Geometry) -> Piece:
    """x: [n·V, b·q, H, W], d: [n·V, b·p, H', W']"""
    (p, q, b), real, kernel = module.weight.shape[:3], real_bins(module.block_size), geometry.kernel
    (x_ends, x_middle), (d_ends, d_middle) = (t.split([real * c, (b - real) * c], 1) for t, c in ((x, q), (d, p)))
    ends = Conv(x_ends, d_ends, views, (real * p, q, *kernel), replace(geometry, groups=real))
    pairs = (b - real) // 2
    if not pairs:
        return Spectra(ends, Dense(x.new_zeros(ends.count, 0, 2 * q, *kernel)), module)
    middle = Conv(x_middle, d_middle, views, (2 * pairs * p, 2 * q, *kernel), replace(geometry, groups=pairs))
    if gram_is_cheaper(2 * middle.tokens, 2 * q * math.prod(kernel), p, d):
        return Spectra(ends, turned(middle), module)
    return Spectra(ends, Pulled(middle, partial(complex_entries, p)), module)


def complex_entries(p: int, g: Tensor) -> Tensor:
    """Gradients of [[Re, Im], [−Im, Re]] to those of Re and Im: [..., f·2p, 2q, k_h, k_w] → [..., f·p, 2q, k_h, k_w]."""
    of_real, of_imaginary = g.unflatten(-4, (-1, 2, p)).unbind(-5)
    im, re = of_imaginary.chunk(2, -3)
    return (of_real + torch.cat([re, -im], -3)).flatten(-5, -4)


def turned(c: Conv) -> Conv:
    """The same gradients as one real convolution with twice the views: d_r beside (x_r, x_i), and d_i beside (x_i, −x_r)."""
    pairs = c.geometry.groups
    re, im = c.x.unflatten(1, (pairs, 2, -1)).unbind(2)
    x = torch.stack([c.x, torch.stack([im, -re], 2).flatten(1, 3)], 1).flatten(0, 1)
    d = c.d.unflatten(1, (pairs, 2, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return Conv(x, d, 2 * c.views, (c.shape[0] // 2, *c.shape[1:]), c.geometry)


def owners(piece: Piece, start: int, stop: int) -> Piece:
    """The gradients of these owners."""
    if isinstance(piece, Pulled):
        return Pulled(owners(piece.piece, start, stop), piece.pull)
    if isinstance(piece, Without):
        return Without(owners(piece.piece, start, stop), piece.bad[start:stop])
    if isinstance(piece, Dense):
        return Dense(piece.g[start:stop])
    assert isinstance(piece, Conv)
    rows = slice(start * piece.views, stop * piece.views)
    return Conv(piece.x[rows], piece.d[rows], piece.views, piece.shape, piece.geometry)
