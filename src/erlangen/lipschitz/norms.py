"""Certified operator norms: upper bounds, never estimates. All in float64, on the weight's own device, without a wait.

Dense. The largest eigenvalue of the Gram matrix by a backward-stable solver on the CPU (its relative error, a few
hundred 2⁻⁵³, is far inside the margin); Gram iteration on other devices: with G₁ = WWᵀ and G_{t+1} = G_t²,
σ(W) ≤ ‖G_T‖_F^(1/2^T), at most rank^(1/2^(T+1)) too large.

Convolution. A convolution with stride s is a convolution with stride 1 over the s·s phases of its input, with a kernel
of k' = ⌈k/s⌉ taps. Zero-padded to n outputs it is a submatrix of the circulant on a grid of M = n + k' − 1 points. Its
norm is at most the largest, over the M×M frequencies, of the norms of P(θ) = Σ_a K_a e^{−i⟨a,θ⟩}. A smaller grid
under-estimates, unless it is paid for: ⟨u, P(θ) v⟩ is a trigonometric polynomial of degree d = (k'−1)/2, and one of
height A at θ₀ is at least A·cos(d(θ−θ₀)) nearby (Bernstein–Szegő), so the maximum over M points per axis, divided by
cos(πd/M) per axis, bounds every frequency, whatever n.

Power iteration bounds from below and is not used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from erlangen.lipschitz.base import MARGIN

#: T of the Gram iteration: rank 1024 costs a factor of at most 1.014, and a random matrix far less
SQUARINGS = 8
#: frequencies per axis above which the grid is capped and paid for (3 taps: a factor of at most 1.04)
LARGEST_GRID = 16


def gram_iteration(matrices: Tensor, squarings: int = SQUARINGS) -> Tensor:
    """An upper bound on the largest singular value of each matrix [..., m, n], by repeated squaring."""
    gram = _gram(matrices)
    log = torch.zeros(gram.shape[:-2], dtype=torch.float64, device=gram.device)
    for _ in range(squarings - 1):
        size = torch.linalg.matrix_norm(gram).clamp(min=1e-300)
        gram = gram / size[..., None, None]
        gram, log = gram @ gram, 2 * (log + size.log())
    return torch.exp((log + torch.linalg.matrix_norm(gram).log()) / 2.0**squarings)


def singular_bound(matrices: Tensor) -> Tensor:
    """An upper bound on the largest singular value of each matrix (up to roundoff of float64)."""
    if matrices.device.type != "cpu":
        return gram_iteration(matrices)
    gram = _gram(matrices)
    finite = gram.abs().amax((-2, -1)).isfinite()
    values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, torch.zeros_like(gram)))
    return torch.where(finite, values[..., -1].clamp(min=0).sqrt(), math.inf)


def dense_norm(weight: Tensor) -> Tensor:
    """Certified bound on ‖W‖₂, margin included."""
    return singular_bound(weight.detach().double()) * MARGIN


def conv_norm(
    weight: Tensor, stride: tuple[int, int], outputs: tuple[int, int] | None, cap: int = LARGEST_GRID
) -> Tensor:
    """Certified bound on the norm of a zero-padded convolution [O, C, kh, kw], margin included.

    ``outputs`` is the size of its output; None means any size. Padding does not matter: it only chooses a submatrix.
    """
    kernel = polyphase(weight.detach().double(), stride)
    grid, paid = [], 1.0
    for axis in (0, 1):
        taps = kernel.shape[2 + axis]
        exact = math.inf if outputs is None else outputs[axis] + taps - 1
        limit = 1 if taps == 1 else max(cap, 4 * taps)
        size = int(min(exact, limit))
        if size < exact:
            paid *= math.cos(math.pi * (taps - 1) / (2 * size))
        grid.append(size)
    symbols = torch.fft.rfft2(kernel, s=tuple(grid)).permute(2, 3, 0, 1)  # conjugate frequencies share their norms
    return singular_bound(symbols.flatten(0, 1)).amax() / paid * MARGIN


def polyphase(kernel: Tensor, stride: tuple[int, int]) -> Tensor:
    """[O, C, kh, kw] with a stride → the equivalent [O, C·sh·sw, ⌈kh/sh⌉, ⌈kw/sw⌉] with stride 1."""
    sh, sw = stride
    taps = math.ceil(kernel.shape[2] / sh), math.ceil(kernel.shape[3] / sw)
    padded = torch.nn.functional.pad(kernel, (0, taps[1] * sw - kernel.shape[3], 0, taps[0] * sh - kernel.shape[2]))
    split = padded.reshape(*kernel.shape[:2], taps[0], sh, taps[1], sw)
    return split.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def overlap(kernel: tuple[int, int], stride: tuple[int, int], outputs: tuple[int, int] | None = None) -> int:
    """The largest number of windows that share an input: ⌈kh/sh⌉·⌈kw/sw⌉, and never more than there are windows."""
    count = [math.ceil(k / s) for k, s in zip(kernel, stride)]
    if outputs is not None:
        count = [min(c, n) for c, n in zip(count, outputs)]
    return math.prod(count)


def _gram(matrices: Tensor) -> Tensor:
    """The smaller of AAᴴ and AᴴA."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    return matrices @ matrices.mH if wide else matrices.mH @ matrices
