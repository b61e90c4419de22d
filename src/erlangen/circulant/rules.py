"""Gradients of every record w.r.t. the free parameters, their norms and sums."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from erlangen.circulant.algebra import half_weights, real_bins, signal, spectrum
from erlangen.circulant.layers import CirculantConv2d, CirculantLinear, by_frequency, linear
from erlangen.gradients.pieces import Dense, Piece, Weight, Without, chunk_size, gram_is_cheaper
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rounding import hidden, outward
from erlangen.gradients.rules.conv import Conv, Geometry
from erlangen.gradients.rules.linear import tokens
from erlangen.gradients.sums import over_views
from erlangen.gradients.tape import Tape


class CirculantOuter(Piece):
    """g_i = Σ_t corr(d_it, x_it) per pair of blocks. x̂: [n, T, q, f], d̂: [n, T, p, f]."""

    def __init__(self, x_hat: Tensor, d_hat: Tensor, block: int) -> None:
        self.x, self.d, self.block = x_hat, d_hat, block

    @property
    def count(self) -> int:
        return self.x.shape[0]

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return not gram_is_cheaper(self.x.shape[1], self.x.shape[2], self.d.shape[2], self.x)

    def _rows(self, product: Tensor) -> Tensor:
        """Unitary spectra multiply to √b times a unitary spectrum: hence the plain inverse."""
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
        if weight is not None:
            return super().norms_squared(weight)
        bins = half_weights(self.block, self.x) * self.block
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
        pairs = zip(self.x.split(size), self.d.split(size), strict=True)
        return [CirculantOuter(x, d, self.block) for x, d in pairs]

    def zero(self, bad: Tensor) -> Piece:
        rows = bad.view(-1, 1, 1, 1)
        return CirculantOuter(torch.where(rows, 0.0, self.x), torch.where(rows, 0.0, self.d), self.block)


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


class CirculantKernels(Piece):
    """Per-owner gradients of a circulant convolution's ŵ, frequency by frequency, where Parseval measures them.

    ``parts``: of DC and Nyquist [n, p, q, k_h, k_w]; of another frequency Re and Im beside each other, [n, p, 2q, k_h, k_w]. A
    complex product is the real one of twice the views: Re g = d_r⊗x_r + d_i⊗x_i and Im g = d_r⊗x_i − d_i⊗x_r are what
    (d_r, d_i) and the channels ((x_r, x_i), (x_i, −x_r)) give.
    """

    def __init__(self, parts: list[Piece], module: CirculantConv2d) -> None:
        self.parts, self.module = parts, module

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def prefers_dense(self) -> bool:  # type: ignore[override]
        return any(part.prefers_dense for part in self.parts)

    @property
    def guarded(self) -> bool:  # type: ignore[override]
        return all(part.guarded for part in self.parts)

    def dense(self) -> Tensor:
        return self.module.pull_back(torch.cat([part.dense() for part in self.parts], 2))

    def weighted_sum(self, w: Tensor) -> Tensor:
        if self.measured_formed:
            return self.sum_of_formed(w)
        return self.module.pull_back(torch.cat([part.weighted_sum(w) for part in self.parts], 1))

    def norms_squared(self, weight: Weight = None) -> Tensor:
        if weight is not None:
            return super().norms_squared(weight)
        block = self.module.block_size
        times = [block] * real_bins(block) + [block / 2] * (len(self.parts) - real_bins(block))
        return sum(part.norms_squared() * t for part, t in zip(self.parts, times, strict=True))  # type: ignore[return-value]

    def formed(self) -> Piece:
        return self._with([part.formed() for part in self.parts])

    def precise(self) -> Piece:
        return self._with([part.precise() for part in self.parts])

    def chunks(self) -> list[Piece]:
        size = min(part.chunks()[0].count for part in self.parts) if self.count else 1
        spans = [slice(start, start + size) for start in range(0, max(self.count, 1), size)]
        return [self._with([owners(part, span) for part in self.parts]) for span in spans]

    def zero(self, bad: Tensor) -> Piece:
        return self._with([part.zero(bad) for part in self.parts])

    def without(self, bad: Tensor) -> Piece:
        again = self.measured_formed or any(part.measured_formed for part in self.parts if not isinstance(part, Dense))
        return Without(self, bad) if again else self.zero(bad)

    def _with(self, parts: list[Piece]) -> Piece:
        return CirculantKernels(parts, self.module)


def owners(part: Piece, span: slice) -> Piece:
    """A part's gradients of these owners."""
    if isinstance(part, Dense):
        return Dense(part.g[span])
    assert isinstance(part, Conv)
    rows = slice(span.start * part.views, span.stop * part.views)
    return Conv(part.x[rows], part.d[rows], part.views, part.shape, part.geometry)


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
        yield weight, CirculantKernels(frequencies(seen, d, views, module, geometry), module)

    out = module._output(tape.tap(many, (x,), (weight,), pieces), None).to(input.dtype)
    if bias is None:
        return out

    def bias_pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(over_views(cotangent.flatten(2).sum(2), views))

    return tape.tap(out + bias.detach()[:, None, None], (), (bias,), bias_pieces)


def frequencies(x: Tensor, d: Tensor, views: int, module: CirculantConv2d, geometry: Geometry) -> list[Piece]:
    """The parts of `CirculantKernels`. x: [n·V, b·q, H, W], d: [n·V, b·p, H', W']"""
    (p, q, b), real = module.weight.shape[:3], real_bins(module.block_size)
    parts: list[Piece] = []
    for k in range(real):
        pair = x[:, k * q : (k + 1) * q], d[:, k * p : (k + 1) * p]
        parts.append(Conv(*pair, views, (p, q, *geometry.kernel), geometry))
    for k in range(real, b, 2):
        re, im = x[:, k * q : (k + 2) * q].chunk(2, 1)
        twice = torch.stack([torch.cat([re, im], 1), torch.cat([im, -re], 1)], 1).flatten(0, 1)
        each = d[:, k * p : (k + 2) * p].unflatten(1, (2, p)).flatten(0, 1)
        parts.append(Conv(twice, each, 2 * views, (p, 2 * q, *geometry.kernel), geometry))
    return parts
