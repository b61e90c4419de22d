"""Block-circulant layers: b times fewer parameters, so b times fewer coordinates to noise.

A b×b block is given by its first row w: W[r, c] = w[(c − r) mod b] (GReDP, Eq. 18). Its product with x is the circular
correlation of w and x, a product of spectra: ŷ = conj(ŵ)·x̂. Sizes that b does not divide are padded with zeros.

The gradient of the free parameters is ĝ = Σ_tokens conj(d̂)·x̂, per pair of blocks. Per-sample norms follow from the
spectra by Parseval, and the dense matrix is never formed: neither for the batch nor for a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from erlangen.gradients.pieces import Dense, Piece, Weight, accumulate_dtype, chunk_size, gram_is_cheaper
from erlangen.gradients.registry import rule
from erlangen.gradients.rounding import hidden, outward
from erlangen.gradients.rules.conv import Conv, Geometry, explicit_padding
from erlangen.gradients.rules.linear import tokens
from erlangen.gradients.tape import Tape


def blocks_for(size: int, block: int) -> int:
    return -(-size // block)


def spectrum(x: Tensor, block: int) -> Tensor:
    """[..., features] → [..., blocks, b//2 + 1], unitary up to the usual half-spectrum weights. At least float32."""
    blocks = blocks_for(x.shape[-1], block)
    x = F.pad(x.to(accumulate_dtype(x)), (0, blocks * block - x.shape[-1]))
    x = x.unflatten(-1, (blocks, block))
    if not x.numel():  # an empty batch has the shape of a spectrum; some FFT libraries refuse it
        half = x[..., : block // 2 + 1]
        return torch.complex(half, half)
    return torch.fft.rfft(x, norm="ortho")


def _signal(x_hat: Tensor, block: int) -> Tensor:
    """The inverse of the unitary half spectrum over the last axis, of an empty batch too."""
    if not x_hat.numel():
        return F.pad(x_hat.real, (0, block - x_hat.shape[-1]))
    return torch.fft.irfft(x_hat, block, norm="ortho")


def half_weights(block: int, like: Tensor) -> Tensor:
    """How often each bin of the half spectrum counts: once at DC and Nyquist, twice elsewhere."""
    w = torch.full((block // 2 + 1,), 2.0, dtype=like.real.dtype, device=like.device)
    w[0] = 1.0
    if block % 2 == 0:
        w[-1] = 1.0
    return w


def multiply(x_hat: Tensor, weight: Tensor) -> Tensor:
    """Σ_q conj(ŵ_pq)·x̂_q for every frequency: [..., q, f] × [p, q, b] → [..., p, f]. One matrix product per bin."""
    w_hat = torch.fft.rfft(weight.to(x_hat.real.dtype)).conj()
    x = x_hat.flatten(0, -3) if x_hat.ndim > 3 else x_hat.reshape(-1, *x_hat.shape[-2:])
    product = torch.bmm(x.permute(2, 0, 1), w_hat.permute(2, 1, 0))  # [f, rows, q] @ [f, q, p]
    return product.permute(1, 2, 0).reshape(*x_hat.shape[:-2], weight.shape[0], x_hat.shape[-1])


class CirculantLinear(nn.Module):
    """y = W x + bias with W made of b×b circulant blocks; the parameter is their first rows, [p, q, b]."""

    def __init__(self, in_features: int, out_features: int, block_size: int, bias: bool = True) -> None:
        super().__init__()
        _check_block(block_size)
        self.in_features, self.out_features, self.block_size = in_features, out_features, block_size
        p, q = blocks_for(out_features, block_size), blocks_for(in_features, block_size)
        self.weight = nn.Parameter(torch.empty(p, q, block_size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        _initialise(self.weight, self.bias, in_features)

    def forward(self, input: Tensor) -> Tensor:
        return _linear(spectrum(input, self.block_size), self.weight, self.bias, self).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, block_size={self.block_size}, bias={self.bias is not None}"

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The matrix this layer stands for, [out, in]."""
        return expand(self.weight)[: self.out_features, : self.in_features]

    @classmethod
    @torch.no_grad()
    def from_dense(cls, layer: nn.Linear, block_size: int) -> CirculantLinear:
        """The nearest block-circulant layer (least squares): each diagonal of each block becomes its mean."""
        new = cls(layer.in_features, layer.out_features, block_size, layer.bias is not None)
        return _filled(new, nearest(layer.weight, block_size), layer)

    def to_dense(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        new = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        return _filled(new, self.dense(), self)


def _linear(x_hat: Tensor, weight: Tensor, bias: Tensor | None, layer: CirculantLinear) -> Tensor:
    y = _signal(multiply(x_hat, weight), layer.block_size)
    y = y.flatten(-2)[..., : layer.out_features]
    return y if bias is None else y + bias


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
        return _signal(product, self.block) * math.sqrt(self.block)

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
    out = _linear(x_hat, weight.detach(), None if bias is None else bias.detach(), module).to(input.dtype)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        owners = cotangent.shape[0] // views
        d = tokens(cotangent, views)
        if weight.requires_grad:
            x = saved[0].reshape(owners, d.shape[1], *saved[0].shape[-2:])
            yield weight, CirculantOuter(x, spectrum(d, block), block)
        if bias is not None and bias.requires_grad:
            yield bias, Dense(d.sum(1))

    return tape.tap(out, (x_hat,), (weight, bias), pieces, tape.batch_dim(input))


# -- convolutions ---------------------------------------------------------------------------------------------------

_CONV_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class CirculantConv2d(nn.Module):
    """A convolution whose channel matrix is block-circulant at every tap; the parameter is [p, q, b, k_h, k_w].

    The channels are transformed; at each of the b//2 + 1 frequencies a complex convolution runs as a real one of twice
    the channels, all frequencies in one grouped call: (b + 2)·2/b² of the dense arithmetic.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        block_size: int,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
    ) -> None:
        super().__init__()
        _check_block(block_size)
        plain = nn.Conv2d(1, 1, kernel_size, stride, padding, dilation, padding_mode=padding_mode)  # checks arguments
        self.in_channels, self.out_channels, self.block_size = in_channels, out_channels, block_size
        self.kernel_size, self.stride, self.dilation = plain.kernel_size, plain.stride, plain.dilation
        self.padding, self.padding_mode = plain.padding, plain.padding_mode
        self._reversed_padding_repeated_twice = plain._reversed_padding_repeated_twice
        p, q = blocks_for(out_channels, block_size), blocks_for(in_channels, block_size)
        self.weight = nn.Parameter(torch.empty(p, q, block_size, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        _initialise(self.weight, self.bias, in_channels * math.prod(self.kernel_size))

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3:  # one image without a batch axis, as nn.Conv2d takes it
            return self.forward(input[None])[0]
        x, geometry = self._channels(input)
        return self._output(_grouped(x, self.kernels(self.weight), geometry), self.bias).to(input.dtype)

    def _channels(self, input: Tensor) -> tuple[Tensor, Geometry]:
        """The spectrum over channels as real channels, grouped by frequency: [n, f·2q, H, W]."""
        x, padding = explicit_padding(self, input)  # type: ignore[arg-type]
        hat = spectrum(x.movedim(1, -1), self.block_size)  # [n, H, W, q, f]
        grouped = torch.stack([hat.real, hat.imag]).permute(1, 5, 0, 4, 2, 3)  # [n, f, 2, q, H, W]
        bins = self.block_size // 2 + 1
        return grouped.flatten(1, 3), Geometry(self.kernel_size, self.stride, padding, self.dilation, bins)

    def kernels(self, weight: Tensor) -> Tensor:
        """conj(ŵ) as real 2×2 blocks [[re, im], [−im, re]], one group per frequency: [f·2p, 2q, k_h, k_w]."""
        hat = torch.fft.rfft(weight.to(accumulate_dtype(weight)), dim=2)  # [p, q, f, k, k]
        re, im = hat.real.movedim(2, 0), hat.imag.movedim(2, 0)
        rows = torch.stack([torch.stack([re, im], 2), torch.stack([-im, re], 2)], 1)  # [f, 2, p, 2, q, k, k]
        return rows.flatten(3, 4).flatten(0, 2)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The adjoint of `kernels`: [..., f·2p, 2q, k_h, k_w] → [..., p, q, b, k_h, k_w]."""
        p, q, b = self.weight.shape[:3]
        bins, lead = b // 2 + 1, gradient.shape[:-4]
        g = gradient.to(accumulate_dtype(gradient)).reshape(*lead, bins, 2, p, 2, q, *self.kernel_size)
        g = g.movedim((-6, -4), (0, 1))
        hat = torch.complex(g[0, 0] + g[1, 1], g[0, 1] - g[1, 0]).movedim(-5, -3)  # [..., p, q, f, k, k]
        if not hat.numel():  # nobody's gradients
            return hat.real.new_zeros(*lead, *self.weight.shape)
        halved = hat / half_weights(b, hat).view(-1, 1, 1)
        return torch.fft.irfft(halved, b, dim=-3, norm="forward")

    def _output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Grouped real channels back to ordinary ones."""
        y = y.to(accumulate_dtype(y))  # autocast convolves in half precision, which has no complex numbers
        y = y.unflatten(1, (self.block_size // 2 + 1, 2, -1)).movedim(2, 0)  # [2, n, f, p, H, W]
        hat = torch.complex(y[0].contiguous(), y[1].contiguous()).movedim(1, -1)  # [n, p, H, W, f]
        out = _signal(hat, self.block_size).movedim(-1, 2).flatten(1, 2)[:, : self.out_channels]
        return out if bias is None else out + bias[:, None, None]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, block_size={self.block_size}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The kernel this layer stands for, [out, in, k_h, k_w]."""
        return expand(self.weight)[: self.out_channels, : self.in_channels]

    @classmethod
    @torch.no_grad()
    def from_dense(cls, layer: nn.Conv2d, block_size: int) -> CirculantConv2d:
        """The nearest convolution with circulant channel blocks (least squares)."""
        if layer.groups != 1:
            raise ValueError(f"a convolution with groups={layer.groups} has no full channel matrix; convert groups=1")
        options: dict[str, Any] = {n: getattr(layer, n) for n in _CONV_OPTIONS}
        new = cls(layer.in_channels, layer.out_channels, block_size=block_size, bias=layer.bias is not None, **options)
        return _filled(new, nearest(layer.weight, block_size), layer)

    def to_dense(self) -> nn.Conv2d:
        """An ordinary layer that computes the same."""
        options: dict[str, Any] = {n: getattr(self, n) for n in _CONV_OPTIONS}
        new = nn.Conv2d(self.in_channels, self.out_channels, bias=self.bias is not None, **options)
        return _filled(new, self.dense(), self)


def _grouped(x: Tensor, kernels: Tensor, geometry: Geometry) -> Tensor:
    return F.conv2d(x, kernels, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


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
        raise ValueError(f"CirculantConv2d got an input of shape {tuple(input.shape)}; private layers need [rows, C, H, W]")
    x, geometry = module._channels(input)
    kernels = module.kernels(weight.detach())
    grouped = _grouped(x, kernels, geometry)

    def pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        # norms and sums from the same float32 values: rounding one of them alone could lift a term above its bound
        d = cotangent.to(accumulate_dtype(cotangent))
        seen = saved[0].to(cotangent.dtype).to(d.dtype)
        yield weight, Pulled(Conv(seen, d, views, kernels.shape, geometry), module.pull_back)

    out = module._output(tape.tap(grouped, (x,), (weight,), pieces), None).to(input.dtype)
    if bias is None:
        return out

    def bias_pieces(saved: tuple[Tensor, ...], cotangent: Tensor, views: int) -> Iterator[tuple[Tensor, Piece]]:
        yield bias, Dense(cotangent.flatten(2).sum(2).unflatten(0, (-1, views)).sum(1))

    return tape.tap(out + bias.detach()[:, None, None], (), (bias,), bias_pieces)


# -- conversion -----------------------------------------------------------------------------------------------------


def expand(weight: Tensor) -> Tensor:
    """First rows [p, q, b, …] → the dense [p·b, q·b, …], W[r, c] = w[(c − r) mod b]."""
    b = weight.shape[2]
    place = torch.arange(b, device=weight.device)  # made there: a copy from the host would stop a CUDA graph
    index = (place[None, :] - place[:, None]) % b  # [r, c]
    return weight[:, :, index].transpose(1, 2).flatten(2, 3).flatten(0, 1)


def nearest(dense: Tensor, block: int) -> Tensor:
    """Least-squares first rows [p, q, b, …] of a dense [out, in, …]: means over the entries that exist."""
    p, q = blocks_for(dense.shape[0], block), blocks_for(dense.shape[1], block)
    count = _diagonals(torch.ones(dense.shape[:2], dtype=dense.dtype, device=dense.device), p, q, block)
    total = _diagonals(dense, p, q, block)
    return total / count.clamp(min=1).view(*count.shape, *[1] * (dense.ndim - 2))


def _diagonals(dense: Tensor, p: int, q: int, block: int) -> Tensor:
    """Sums over the wrapped diagonals of every block."""
    padded = dense.new_zeros(p * block, q * block, *dense.shape[2:])
    padded[: dense.shape[0], : dense.shape[1]] = dense
    cells = padded.unflatten(1, (q, block)).unflatten(0, (p, block)).transpose(1, 2)  # [p, q, r, c, …]
    return sum(torch.roll(cells[:, :, r], -r, 2) for r in range(block))  # type: ignore[return-value]


def make_circulant(model: nn.Module, block_size: int, skip: tuple[str, ...] = (), fresh: bool = False) -> nn.Module:
    """Replace every Linear and full Conv2d by its nearest circulant twin, in place, except the paths in ``skip``.

    A layer that stands in several places has one twin, in all of them; ``skip`` of one place leaves it in all. A model that
    is itself a layer has its twin returned. ``fresh`` draws new weights instead: the nearest twin of *random* weights is √b
    times too small to train from.
    """
    places: dict[nn.Module, list[str]] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1):
            places.setdefault(layer, []).append(path)
    chosen = {layer: paths for layer, paths in places.items() if not set(paths) & set(skip)}
    _refuse_tied(model, chosen)
    for layer, paths in chosen.items():
        new = _twin(layer, block_size, fresh)
        if layer is model:
            return new
        for path in paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    return model


def _twin(layer: nn.Module, block_size: int, fresh: bool) -> nn.Module:
    """The nearest circulant layer, or one with new weights."""
    new: CirculantLinear | CirculantConv2d
    if isinstance(layer, nn.Linear):
        new, inputs = CirculantLinear.from_dense(layer, block_size), layer.in_features
    else:
        assert isinstance(layer, nn.Conv2d)
        new, inputs = CirculantConv2d.from_dense(layer, block_size), layer.in_channels * math.prod(layer.kernel_size)
    if fresh:
        _initialise(new.weight, new.bias, inputs)
    return new


def _refuse_tied(model: nn.Module, chosen: dict[nn.Module, list[str]]) -> None:
    """A tensor that two modules own would be two tensors after conversion: the tie would be lost without a word."""
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, {})[module] = f"{path}.{name}".lstrip(".")
    for who in owners.values():
        if len(who) > 1 and set(who) & set(chosen):
            ours = next(chosen[module][0] for module in who if module in chosen)
            raise ValueError(
                f"{' and '.join(map(repr, who.values()))} are one parameter; a circulant twin would untie them: name {ours!r} and "
                "the others in skip, or share the whole layer"
            )


def _filled(new: Any, weight: Tensor, old: Any) -> Any:
    """``new`` with this weight and the old layer's bias, on its device and in its precision."""
    with torch.no_grad():
        new.to(old.weight.device, old.weight.dtype)
        new.weight.copy_(weight)
        if old.bias is not None:
            new.bias.copy_(old.bias)
    return new


def _check_block(block_size: int) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}; circulant blocks need a whole number ≥ 1")


def _initialise(weight: Tensor, bias: Tensor | None, fan_in: int) -> None:
    """Entries of the dense matrix as in torch's own layers: uniform within 1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


__all__ = ["CirculantConv2d", "CirculantLinear", "expand", "make_circulant", "nearest"]
