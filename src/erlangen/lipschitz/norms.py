"""Certified operator norms: upper bounds, never estimates; many matrices at once, on their own device, without a wait.

Gram iteration (Delattre et al. 2023). With G₁ = AAᴴ and G_{t+1} = G_tG_tᴴ, ‖A‖ = ‖G_T‖^(1/2^T), and ‖G‖ is at most its
Frobenius norm and at most its largest row or column sum: too large by r^(1/2^(T+1)) at worst, and hardly at all both for
matrices with a gap and for nearly orthogonal ones.

Rounding is paid for. A product of r×n by n×r matrices computed with unit roundoff u is wrong by at most γ‖A‖_F‖B‖_F in
Frobenius norm, whatever the order of summation, with γ = (n+4)u, and 2√2 times that for complex numbers. Since
‖G‖_F² ≤ r‖G‖², one computed product satisfies ‖G‖² ≤ ‖fl(GGᴴ)‖/(1 − rγ): every squaring costs a known factor whose
2^t-th root counts, and the iteration may run in float32 where rγ is small (`LARGEST_SINGLE`). The first Gram matrix of a
real matrix, whose inner dimension is the long one, is formed in float64.

Convolution. A convolution with stride s is a convolution with stride 1 over the s·s phases of its input, with a kernel
of k' = ⌈k/s⌉ taps. Zero-padded to n outputs it is a submatrix of the circulant on a grid of M = n + k' − 1 points. Its
norm is at most the largest, over the M×M frequencies, of the norms of P(θ) = Σ_a K_a e^{−i⟨a,θ⟩}. A smaller grid
under-estimates, unless it is paid for: ⟨u, P(θ) v⟩ is a trigonometric polynomial of degree d = (k'−1)/2, and one of
height A at θ₀ is at least A·cos(d(θ−θ₀)) nearby (Bernstein–Szegő), so the maximum over M points per axis, divided by
cos(πd/M) per axis, bounds every frequency, whatever n.

Power iteration bounds from below and is not used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from erlangen.lipschitz.base import MARGIN
from erlangen.lipschitz.precision import full_precision

#: T of the Gram iteration: rank 1024 costs a factor of at most 1.014, and a random matrix far less
SQUARINGS = 8
#: frequencies per axis above which the grid is capped and paid for (3 taps: a factor of at most 1.04)
LARGEST_GRID = 16
#: rank above which the iteration runs in float64, because float32's rounding would cost more than 0.5 %
LARGEST_SINGLE = 128
#: what underflow can hide, added to every bound
TINY = 1e-12


@dataclass(frozen=True)
class Symbols:
    """Matrices [F, m, n] (or one, [m, n]) whose largest singular value, times ``factor``, bounds an operator norm."""

    matrices: Tensor
    factor: float = 1.0

    @property
    def rank(self) -> int:
        return min(self.matrices.shape[-2:])


def certified(operators: Sequence[Symbols]) -> list[Tensor]:
    """A certified bound for each operator, margin included, as float64 scalars. Similar ranks share their kernels."""
    found, factors = largest_values(operators)
    return [bound * factor + TINY for bound, factor in zip(found, factors, strict=True)]


def largest_values(operators: Sequence[Symbols]) -> tuple[list[Tensor], list[float]]:
    """Float64 scalars and factors: value·factor + TINY is a certified bound. The factors depend on shapes alone."""
    groups: list[list[int]] = []
    for index in sorted(range(len(operators)), key=lambda i: -operators[i].rank):
        largest = operators[groups[-1][0]].rank if groups else 0
        if groups and (operators[index].rank >= 0.75 * largest or largest <= 32):
            groups[-1].append(index)
        else:
            groups.append([index])
    values: dict[int, Tensor] = {}
    factors: dict[int, float] = {}
    with full_precision():
        for members in groups:
            found, rounding = gram_iteration([operators[i].matrices for i in members])
            values |= dict(zip(members, found, strict=True))
            factors |= {i: r * operators[i].factor * MARGIN for i, r in zip(members, rounding, strict=True)}
    return [values[i] for i in range(len(operators))], [factors[i] for i in range(len(operators))]


def gram_iteration(stacks: Sequence[Tensor], squarings: int = SQUARINGS) -> tuple[list[Tensor], list[float]]:
    """For each stack [F, m, n] (or [m, n]) a float64 scalar, and the factor that makes it bound the largest singular value.

    The iteration runs on all of them together; smaller Gram matrices are padded by zeros. Not finite where a stack is
    not, or where its squares leave float32's range.
    """
    rank, complex_ = max(min(s.shape[-2:]) for s in stacks), any(s.is_complex() for s in stacks)
    single = rank <= LARGEST_SINGLE
    grams = [_first_gram(stack.detach(), rank, complex_, single) for stack in stacks]
    gram = torch.cat(grams) if len(grams) > 1 else grams[0]
    log = torch.zeros(len(gram), dtype=torch.float64, device=gram.device)
    for t in range(1, squarings):
        if t % 3 == 1 and t + 1 < squarings:  # norms lie in [1/√r, 1] after this: in range for four squarings more
            gram = gram.contiguous()
            entries = (torch.view_as_real(gram) if complex_ else gram).view(len(gram), -1)
            # taken in float64: the square of a small entry would vanish, and its norm explode
            size = torch.linalg.vector_norm(entries, dim=1, dtype=torch.float64).clamp(min=1e-30).to(entries.dtype)
            entries.div_(size[:, None])  # in the memory of ``gram``
            log = log + size.double().log() / 2.0**t
        gram = gram @ gram.mH
    bound = torch.exp(log + _norm_bound(gram).double().log() / 2.0**squarings)
    values = [part.amax() for part in bound.split([len(g) for g in grams])]
    return values, [_rounding(rank, max(stack.shape[-2:]), complex_, single) for stack in stacks]


def _first_gram(matrices: Tensor, rank: int, complex_: bool, single: bool) -> Tensor:
    """[F, rank, rank]: the smaller of AAᴴ and AᴴA. Formed in float64 where A is real, or where single is too coarse."""
    matrices = matrices if matrices.ndim == 3 else matrices[None]
    if not matrices.is_complex():
        matrices = matrices.double()
    elif not single:
        matrices = matrices.to(torch.complex128)
    wide = matrices.shape[-2] <= matrices.shape[-1]
    gram = matrices @ matrices.mH if wide else matrices.mH @ matrices
    dtype = (torch.complex64 if single else torch.complex128) if complex_ else _real(single)
    missing = rank - gram.shape[-1]
    return torch.nn.functional.pad(gram.to(dtype), (0, missing, 0, missing)) if missing else gram.to(dtype)


def _norm_bound(gram: Tensor) -> Tensor:
    """‖G‖ ≤ ‖G‖_F and ‖G‖² ≤ ‖G‖₁·‖G‖_∞ (largest sums of columns and of rows)."""
    size = gram.abs()
    sums = (size.sum(1).amax(1) * size.sum(2).amax(1)).sqrt()
    return torch.minimum(torch.linalg.vector_norm(size, dim=(1, 2)), sums)


def _rounding(rank: int, longest: int, complex_: bool, single: bool) -> float:
    """What the roundings of the whole iteration can have hidden, as a factor ≥ 1 on the singular value."""
    u = torch.finfo(_real(single)).eps / 2
    constant = 2 * math.sqrt(2) if complex_ else 1.0
    square = 1.0 - rank * (constant * (rank + 4) * u + 4 * u)  # a squaring, and the scaling or cast before it
    first_u = u if complex_ else torch.finfo(torch.float64).eps / 2
    first = 1.0 - rank * (constant * (longest + 4) * first_u + 4 * u)
    if square <= 0.5 or first <= 0.5:
        raise ValueError(f"a matrix of rank {rank} with {longest} columns is too large to be certified")
    last = 1.0 + 2 * (rank**2 + 8) * u  # of the final norms
    return (last / (square * first)) ** 0.5


def _real(single: bool) -> torch.dtype:
    return torch.float32 if single else torch.float64


def dense_symbols(weight: Tensor) -> Symbols:
    """‖W‖₂ itself."""
    return Symbols(weight.detach())


def dense_norm(weight: Tensor) -> Tensor:
    """Certified bound on ‖W‖₂, margin included."""
    return certified([dense_symbols(weight)])[0]


def conv_symbols(
    weight: Tensor, stride: tuple[int, int], outputs: tuple[int, int] | None, cap: int = LARGEST_GRID
) -> Symbols:
    """P(θ) of a zero-padded convolution [O, C, kh, kw] on its grid of frequencies.

    ``outputs`` is the size of its output; None means any size. Padding does not matter: it only chooses a submatrix.
    float32 weights give complex64 symbols, and the factor covers their rounding: entry by entry at most (taps + 6)·2u of
    Σ_a|K_a|, hence (taps + 6)·2u·√taps·‖K‖_F in Frobenius norm, and ‖K‖_F ≤ √rank·max‖P‖ by Parseval.
    """
    kernel = polyphase(weight.detach(), stride)
    grid, paid = [], 1.0
    for axis in (0, 1):
        taps = kernel.shape[2 + axis]
        exact = math.inf if outputs is None else outputs[axis] + taps - 1
        limit = 1 if taps == 1 else max(cap, 4 * taps)
        size = int(min(exact, limit))
        if size < exact:
            paid *= math.cos(math.pi * (taps - 1) / (2 * size))
        grid.append(size)
    taps_all, rank = math.prod(kernel.shape[2:]), min(kernel.shape[:2])
    u = torch.finfo(kernel.dtype).eps / 2
    lost = 2 * (taps_all + 6) * u * math.sqrt(taps_all * rank)
    waves = _waves(tuple(kernel.shape[2:]), tuple(grid), kernel.dtype, kernel.device)  # type: ignore[arg-type]
    with full_precision():
        flat = waves @ kernel.flatten(2).permute(2, 0, 1).flatten(1)
    real, imaginary = flat.view(2, -1, *kernel.shape[:2])
    return Symbols(torch.complex(real, imaginary), 1.0 / (paid - lost))


@functools.cache  # never evicted: a captured graph reads them where they are
def _waves(taps: tuple[int, int], grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2·F, taps]: cosines, then minus sines, of ⟨a, θ⟩ on half of the grid (conjugate frequencies share their norms)."""
    theta = [2 * math.pi * torch.arange(n, dtype=torch.float64) / n for n in grid]
    rows = theta[0] if grid[1] > 1 else theta[0][: grid[0] // 2 + 1]
    columns = theta[1][: grid[1] // 2 + 1]
    vertical = rows[:, None, None, None] * torch.arange(taps[0])[:, None]
    angle = vertical + columns[:, None, None] * torch.arange(taps[1])
    flat = angle.flatten(2).flatten(0, 1)
    return torch.cat([flat.cos(), -flat.sin()]).to(device, dtype)


def conv_norm(
    weight: Tensor, stride: tuple[int, int], outputs: tuple[int, int] | None, cap: int = LARGEST_GRID
) -> Tensor:
    """Certified bound on the norm of a zero-padded convolution, margin included; see `conv_symbols`."""
    return certified([conv_symbols(weight, stride, outputs, cap)])[0]


def polyphase(kernel: Tensor, stride: tuple[int, int]) -> Tensor:
    """[O, C, kh, kw] with a stride → the equivalent [O, C·sh·sw, ⌈kh/sh⌉, ⌈kw/sw⌉] with stride 1."""
    if stride == (1, 1):
        return kernel
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
