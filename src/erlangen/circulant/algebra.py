"""Spectra of blocks, their product, and the dense matrices that blocks stand for."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from erlangen.gradients.precision import accumulate_dtype


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


def signal(x_hat: Tensor, block: int) -> Tensor:
    """The inverse of the unitary half spectrum over the last axis, of an empty batch too."""
    if not x_hat.numel():
        return F.pad(x_hat.real, (0, block - x_hat.shape[-1]))
    return torch.fft.irfft(x_hat, block, norm="ortho")


def real_bins(block: int) -> int:
    """How many frequencies of a block have no imaginary part: DC, and Nyquist where b is even."""
    return 1 if block % 2 else 2


def coordinates(block: int, like: Tensor) -> Tensor:
    """The orthonormal real Fourier matrix [b, b]: a row for DC, one for Nyquist, then two a frequency, Re and Im."""
    place = torch.arange(block, device=like.device)  # made there: a copy from the host would stop a CUDA graph
    pairs = place[real_bins(block) :] - real_bins(block)
    bins = torch.cat([place[: real_bins(block)] * (block // 2), 1 + pairs // 2])
    angle = (bins[:, None] * place % block).double() * (2 * math.pi / block)
    imaginary = (place >= real_bins(block)) & ((place - real_bins(block)) % 2 == 1)
    rows = torch.where(imaginary[:, None], -angle.sin(), angle.cos())
    return (rows / scales(block, rows)[:, None]).to(like.dtype)


def scales(block: int, like: Tensor) -> Tensor:
    """How many times its orthonormal coordinate an entry of ŵ is: √b at DC and Nyquist, √(b/2) elsewhere."""
    real = torch.arange(block, device=like.device) < real_bins(block)
    return torch.where(real, float(block), block / 2).double().sqrt().to(like.dtype)


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


def shifts(block: int, device: torch.device) -> Tensor:
    """(r + s) mod b, [r, s]: where the wrapped diagonals of a block lie."""
    k = torch.arange(block, device=device)
    return (k[:, None] + k[None, :]) % block


def _diagonals(dense: Tensor, p: int, q: int, block: int) -> Tensor:
    """Sums over the wrapped diagonals of every block."""
    padded = dense.new_zeros(p * block, q * block, *dense.shape[2:])
    padded[: dense.shape[0], : dense.shape[1]] = dense
    cells = padded.unflatten(1, (q, block)).unflatten(0, (p, block)).transpose(1, 2)  # [p, q, r, c, …]
    return sum(torch.roll(cells[:, :, r], -r, 2) for r in range(block))  # type: ignore[return-value]
