"""Gradients of every record w.r.t. the free parameters, their norms and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from erlangen.circulant.algebra import half_weights, signal, spectrum
from erlangen.circulant.layers import CirculantConv2d, CirculantLinear, grouped, linear
from erlangen.gradients.pieces import Dense, Piece, Weight, chunk_size, gram_is_cheaper
from erlangen.gradients.precision import accumulate_dtype
from erlangen.gradients.registry import rule
from erlangen.gradients.rounding import hidden, outward
from erlangen.gradients.rules.conv import Conv
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


class Pulled(Piece):
    """Per-owner gradients of another weight, pulled back to the parameter behind it by a linear map."""

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


@rule(CirculantConv2d)
def circulant_convolution(module: CirculantConv2d, tape: Tape, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if input.dim() != 4:
        raise ValueError(
            f"CirculantConv2d got an input of shape {tuple(input.shape)}; private layers need [rows, C, H, W]"
        )
    x, geometry = module._channels(input)
    kernels = module.kernels(weight.detach())
    many = grouped(x, kernels, geometry)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        # norms and sums from the same float32 values: rounding one of them alone could lift a term above its bound
        d = cotangent.to(accumulate_dtype(cotangent))
        seen = saved[0].to(cotangent.dtype).to(d.dtype)
        yield weight, Pulled(Conv(seen, d, views, kernels.shape, geometry), module.pull_back)

    out = module._output(tape.tap(many, (x,), (weight,), pieces), None).to(input.dtype)
    if bias is None:
        return out

    def bias_pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(over_views(cotangent.flatten(2).sum(2), views))

    return tape.tap(out + bias.detach()[:, None, None], (), (bias,), bias_pieces)
