"""Fourier coordinates of a parameter: real, orthonormal, and with a projector onto chosen frequencies.

The transform is the Hartley form of the unitary FFT, H g = Re F g − Im F g. It is real, symmetric and its own inverse
(F = R + iM is unitary and symmetric, so R² + M² = I and RM = 0, hence H² = I). A real gradient of N entries has exactly
N real coordinates, with no weights at DC and Nyquist to forget: white noise on them is white noise on the gradient. A
set of frequencies that contains −k with k is a set of Hartley coordinates, so a conjugate-symmetric filter is a mask.

Convolution kernels are transformed over their kernel axes (cropped, never padded to the image: clipping the full
correlation would waste most of C), block-circulant weights over the block axis. Both are "every axis after the first
two". Dense matrices and vectors have no frequencies and stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from erlangen.gradients.filtered import KernelFilter
from erlangen.gradients.pieces import Weight
from erlangen.gradients.precision import accumulate_dtype, exact_float32
from erlangen.mechanisms.geometry import GUARD, Geometry

ORDERS = ("filter-first", "clip-first")

# Largest transform done as a matrix product: tiny FFTs over many kernels are slower.
MATRIX_SIZE = 256

# Inner dimension that small kernels are packed to.
PACKED_SIZE = 36


def hartley(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Orthonormal real Fourier transform over ``dims``; its own inverse."""
    if not dims:
        return x
    f = torch.fft.fftn(x, dim=tuple(dims), norm="ortho")
    return f.real - f.imag


def parity(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x[−k mod N] over ``dims``: even sequences are unchanged, odd ones change sign."""
    return torch.roll(torch.flip(x, list(dims)), [1] * len(dims), list(dims)) if dims else x


def low_pass(sizes: Sequence[int], ratio: float) -> Tensor:
    """The smallest set of lowest frequencies with at least ratio·N of the N coordinates, whole rings only.

    A ring is all frequencies with the same Σ (k/N)²; it contains −k with k, so that the mask is conjugate-symmetric.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}; it is the share of frequencies kept and must lie in (0, 1]")
    grids = torch.meshgrid(*[torch.fft.fftfreq(n, dtype=torch.float64).square() for n in sizes], indexing="ij")
    radius = torch.stack(grids).sum(0)
    wanted = math.ceil(ratio * radius.numel() - 1e-9)
    edge = radius.flatten().sort().values[wanted - 1]
    return radius <= edge + 1e-12


def check_symmetric(name: str, mask: Tensor) -> None:
    """A filter that keeps k but not −k would make the released gradient complex."""
    flipped = parity(mask, range(mask.ndim))
    if not torch.equal(mask, flipped):
        where = tuple(int(i) for i in (mask != flipped).nonzero()[0])
        raise ValueError(f"the mask of {name!r} keeps frequency {where} but not its negative; keep both or neither")
    if not bool(mask.any()):
        raise ValueError(f"the mask of {name!r} keeps no frequency at all; drop the parameter from training instead")


def packing(kernels: int, size: int) -> int:
    """How many small kernels share one row of a matrix product: tiny inner dimensions waste the machine."""
    return next(r for r in range(max(1, min(kernels, PACKED_SIZE // size)), 0, -1) if kernels % r == 0)


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """In their own precision, whatever the user has asked of products elsewhere.

    A norm that is rounded to ten bits could let a gradient pass that is too long; a sum that is rounded before its noise may
    move by many bounds for one record.
    """
    with exact_float32():
        return rows @ matrix


def scales(mask: Tensor) -> Tensor:
    """(P + κ²I)^½ on Hartley coordinates."""
    return torch.where(mask, math.sqrt(1 + GUARD**2), GUARD).double()


class Fourier(Geometry):
    """T = P·H: Hartley coordinates of the frequencies that are kept. Unitary when all are.

    ``ratio`` keeps a low-pass share of each parameter's frequencies, or of those that it names (the others keep all);
    ``masks`` names the frequencies of a parameter explicitly (FFT order, shaped like the transformed axes; lists will do);
    ``axes`` names the axes to transform where the rule at the top of this file is not the right one. All of these are fixed
    before training and independent of the data.
    """

    guarded = True

    def __init__(
        self,
        ratio: float | Mapping[str, float] = 1.0,
        masks: Mapping[str, Tensor | Sequence[Any]] | None = None,
        axes: Mapping[str, Sequence[int]] | None = None,
        order: str = "filter-first",
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}")
        #: of the parameters that are not named, and of those that are
        self.ratio, self.order = (1.0 if isinstance(ratio, Mapping) else ratio), order
        self._ratios = dict(ratio) if isinstance(ratio, Mapping) else {}
        for share in (self.ratio, *self._ratios.values()):
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise ValueError(f"ratio is {ratio!r}; give one number in (0, 1], or one by parameter: {{name: number}}")
            low_pass((1,), share)
        self._given = {name: torch.as_tensor(m).detach().to("cpu", torch.bool) for name, m in (masks or {}).items()}
        self._axes = {name: tuple(a) for name, a in (axes or {}).items()}
        self.dims: dict[str, tuple[int, ...]] = {}
        self.mask: dict[str, Tensor] = {}
        #: whether nothing is filtered out
        self._whole: dict[str, bool] = {}

    def bind(self, shapes: Mapping[str, torch.Size]) -> None:
        for what, names in (("masks", self._given), ("axes", self._axes), ("ratio", self._ratios)):
            unknown = sorted(set(names) - set(shapes))
            if unknown:
                raise ValueError(f"{what} names {unknown}, which are not trained; the parameters are {sorted(shapes)}")
        self.shapes = dict(shapes)
        self._matrices: dict[tuple[str, str, int, torch.dtype, torch.device], Tensor] = {}
        self._weights: dict[str, Weight] = {}
        for name, shape in shapes.items():
            axes = self._axes.get(name, tuple(range(2, len(shape))))
            if any(not -len(shape) <= a < len(shape) for a in axes) or len({a % len(shape) for a in axes}) < len(axes):
                raise ValueError(f"axes of {name!r} are {axes}, but its shape is {tuple(shape)}")
            self.dims[name] = tuple(sorted((a % len(shape)) - len(shape) for a in axes))
            self.mask[name] = self._mask_of(name, [shape[d] for d in self.dims[name]])
            self._whole[name] = bool(self.mask[name].all())
            self._weights[name] = self._weight_of(name, len(shape))

    def _mask_of(self, name: str, sizes: list[int]) -> Tensor:
        mask = self._given.get(name)
        if mask is None:
            if name in self._ratios and not sizes:
                raise ValueError(f"ratio names {name!r}, which has no frequencies; name its axes, or leave it out")
            share = self._ratios.get(name, self.ratio)
            return low_pass(sizes, share) if sizes else torch.ones((), dtype=torch.bool)
        if list(mask.shape) != sizes:
            raise ValueError(f"the mask of {name!r} has shape {tuple(mask.shape)}; its frequencies are {tuple(sizes)}")
        check_symmetric(name, mask)
        return mask

    def kept(self, name: str) -> float:
        """K/N: the share of coordinates that are released."""
        return float(self.mask[name].double().mean())

    def weight(self, name: str) -> Weight:
        """How ‖P g‖ is measured.

        Layers that filter what they form add up P g, and measure ‖P g‖. Where raw gradients are summed and projected once,
        a huge gradient outside the kept frequencies must not pass: it would absorb the others in floating point before P
        removes it. The norm is then ‖(P + κ²I)^½ g‖ ≥ ‖P g‖ with κ = 1/64: a part in eight thousand more clipping for a
        gradient inside, and no term of the raw sum above 64·C.
        """
        return self._weights[name]

    def _weight_of(self, name: str, axes: int) -> Weight:
        if self.order == "clip-first" or self._whole[name]:
            return None
        guarded = functools.partial(self._guarded, name)
        if not self._as_matrix(name) or len(self.dims[name]) != axes - 2:
            return guarded
        return KernelFilter(self.mask[name], functools.partial(self._kept, name), guarded)

    def _kept(self, name: str, like: Tensor) -> Tensor:
        """The kept columns of H, [N, K]"""
        return self._matrix(name, like, "kept")

    def _guarded(self, name: str, g: Tensor) -> Tensor:
        g = g.to(accumulate_dtype(g))
        if self._as_matrix(name):
            size = self.mask[name].numel()
            pack = packing(g[0].numel() // size, size)
            return product(g.reshape(g.shape[0], -1, pack * size), self._matrix(name, g, "guarded", pack))
        dims = self.dims[name]
        over = scales(self.mask[name]).to(g)
        shape = [over.shape[dims.index(k - g.ndim)] if k - g.ndim in dims else 1 for k in range(g.ndim)]
        return hartley(g, dims) * over.view(shape)

    def _as_matrix(self, name: str) -> bool:
        """Whether the transformed axes are the last ones, with few entries."""
        dims = self.dims[name]
        return dims == tuple(range(-len(dims), 0)) and self.mask[name].numel() <= MATRIX_SIZE

    def _matrix(self, name: str, like: Tensor, kind: str, pack: int = 1) -> Tensor:
        """H acting from the right on flattened axes: its kept columns, or all of them scaled for the guarded norm."""
        key = (name, kind, pack, like.dtype, like.device)
        if key not in self._matrices:
            mask = self.mask[name]
            units = torch.eye(mask.numel(), dtype=torch.float64).view(-1, *mask.shape)
            h = hartley(units, tuple(range(1, units.ndim))).flatten(1)
            h = h * scales(mask).flatten() if kind == "guarded" else h[:, mask.flatten()]
            self._matrices[key] = torch.block_diag(*[h] * pack).to(like)
        return self._matrices[key]

    def forward(self, name: str, g: Tensor) -> Tensor:
        """The kept coordinates, [..., K] with the transformed axes last and flattened."""
        dims = self.dims[name]
        if not dims:
            return g
        if self._as_matrix(name):
            return product(g.flatten(g.ndim - len(dims)), self._matrix(name, g, "kept"))
        h = torch.movedim(hartley(g, dims), list(dims), list(range(-len(dims), 0)))
        return h.flatten(h.ndim - len(dims))[..., self.mask[name].flatten().to(g.device)]

    def inverse(self, name: str, c: Tensor) -> Tensor:
        dims, mask = self.dims[name], self.mask[name]
        if not dims:
            return c
        if self._as_matrix(name):
            return product(c, self._matrix(name, c, "kept").T).unflatten(-1, mask.shape)
        h = c.new_zeros(*c.shape[:-1], mask.numel())
        h[..., mask.flatten().to(c.device)] = c
        h = torch.movedim(h.unflatten(-1, mask.shape), list(range(-len(dims), 0)), list(dims))
        return hartley(h, dims)

    def energy(self, name: str, like: Tensor) -> Tensor | float:
        """diag(P): constant, because P commutes with shifts."""
        return self.kept(name)
