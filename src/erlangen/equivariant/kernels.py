"""Steerable kernels in closed form: K(gx) = ρ_out(g) K(x) ρ_in(g)⁻¹.

Between two irreps every solution is a sum of R(r)·K_m(φ), where R is any radial profile and K_m(φ) is a matrix of
circular harmonics of frequency m. With φ measured from the reflection axis, J the quarter turn and S = diag(1, −1), the
matrices of frequency m are spanned by R(±mφ)·A with A in {1, J, S, SJ}; the equivariant ones are the images of these
under the average over the group (Weiler & Cesa, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from erlangen.equivariant.groups import REFLECTION_AXIS
from erlangen.equivariant.representations import Irrep

_I = np.eye(2)
_J = np.array([[0.0, -1.0], [1.0, 0.0]])
_S = np.diag([1.0, -1.0])


@cache
def angular_solutions(inp: Irrep, out: Irrep, m: int) -> tuple[np.ndarray, ...]:
    """Equivariant harmonics of frequency ``m`` between two irreps, each as coefficients [2, d_out, d_in].

    The kernel is K(φ) = c[0]·cos(mφ) + c[1]·sin(mφ), with φ measured from the reflection axis. The solutions are
    orthonormal in the space of coefficients, and complete.
    """
    average = _group_average(inp, out, m)
    found: list[np.ndarray] = []
    for coefficients in _candidates(inp, m):
        candidate = average(coefficients[:, : out.dim, : inp.dim])
        for other in found:
            candidate = candidate - other * np.sum(other * candidate)
        norm = np.linalg.norm(candidate)
        if norm > 1e-9:
            found.append(candidate / norm)
    return tuple(found)


def _candidates(inp: Irrep, m: int) -> list[np.ndarray]:
    """Matrices of frequency m, [2, 2, 2], spanning all of them.

    Where the group sees cos(mφ) and sin(mφ) as two separate one-dimensional irreps (m a multiple of N/2) they are kept
    apart, so that a wave which vanishes at every tap is a solution of its own and can be left out.
    """
    shapes = (_I, _J, _S, _S @ _J)
    zero = np.zeros((2, 2))
    if m == 0:
        return [np.stack([a, zero]) for a in shapes]
    rotations = inp.group.rotations
    if rotations is not None and 2 * m % rotations == 0:
        return [np.stack([a, zero]) for a in shapes] + [np.stack([zero, a]) for a in shapes]
    # R(±mφ)·A = cos(mφ)·A ± sin(mφ)·JA
    return [np.stack([a, sign * _J @ a]) for sign in (1, -1) for a in shapes]


def _group_average(inp: Irrep, out: Irrep, m: int) -> Callable[[np.ndarray], np.ndarray]:
    """Mean over the group of ρ_out(g)⁻¹ K(gφ) ρ_in(g), exact also for SO(2) and O(2).

    For a continuous group the integrand is a trigonometric polynomial of degree at most m + k_in + k_out, whose
    mean over more equally spaced angles than that is its integral.
    """
    rotations = None if inp.group.is_finite else m + inp.frequency + out.frequency + 1
    rho_in, rho_out = _sampled_matrices(inp, rotations), _sampled_matrices(out, rotations)
    angles, flips = np.array([(m * g.angle, -1.0 if g.flip else 1.0) for g in inp.group.sample(rotations)]).T
    c, s, flip = (v[:, None, None] for v in (np.cos(angles), np.sin(angles), flips))

    def average(coefficients: np.ndarray) -> np.ndarray:
        # cos(m gφ) = c·cos(mφ) ∓ s·sin(mφ), sin(m gφ) = s·cos(mφ) ± c·sin(mφ), where gφ = ±φ + θ
        cosine, sine = coefficients
        moved = np.stack([c * cosine + s * sine, flip * (c * sine - s * cosine)])
        return (rho_out.transpose(0, 2, 1) @ moved @ rho_in).mean(1)

    return average


@cache
def _sampled_matrices(psi: Irrep, rotations: int | None) -> np.ndarray:
    return np.stack([psi.matrix(g) for g in psi.group.sample(rotations)])


@dataclass(frozen=True)
class KernelGrid:
    """Where kernels are sampled and how they are band-limited: Gaussian rings, and a highest frequency on each ring.

    The defaults for odd sizes are those of escnn: one ring per pixel of radius, width 0.6 (0.4 on the outer ring, 0.005
    at the centre), and frequencies that the ring can carry without aliasing. Even sizes have no tap at the centre, and
    their rings lie between the whole radii. ``dilation`` puts taps and rings further apart and leaves widths and
    frequencies per pixel as they are, as escnn does; beyond 1 the rings are narrower than the distance of the taps.
    """

    size: int
    rings: tuple[float, ...]
    widths: tuple[float, ...]
    frequencies: tuple[int, ...]
    dilation: int = 1

    @classmethod
    def build(
        cls,
        size: int,
        dilation: int = 1,
        rings: tuple[float, ...] | None = None,
        widths: tuple[float, ...] | None = None,
        cutoff: float | Callable[[float], float] | None = None,
    ) -> KernelGrid:
        """A grid with the default rings; ``cutoff`` is a frequency per unit of radius, or a function of the radius."""
        if size < 1:
            raise ValueError(f"kernel size must be at least 1, got {size}")
        if rings is None:
            rings = tuple((0.5 * ((size + 1) % 2) + r) * dilation for r in range((size + 1) // 2))
        if widths is None:
            widths = tuple(0.005 if r == 0 else 0.4 if i == len(rings) - 1 else 0.6 for i, r in enumerate(rings))
        if len(widths) != len(rings):
            raise ValueError(f"{len(rings)} rings need as many widths, got {len(widths)}")
        limit = _default_cutoff(size, rings[-1]) if cutoff is None else cutoff
        highest = tuple(math.floor(limit(r) if callable(limit) else limit * r) for r in rings)
        return cls(size, rings, widths, highest, dilation)

    def points(self) -> np.ndarray:
        """Coordinates [2, k, k] of the kernel's taps: x to the right, y upwards (rows run downwards)."""
        axis = (np.arange(self.size) - (self.size - 1) / 2) * self.dilation
        y, x = np.meshgrid(-axis, axis, indexing="ij")
        return np.stack([x, y])


def _default_cutoff(size: int, last: float) -> Callable[[float], float]:
    """Twice the radius at most, less one on even radii inside; 2 on the outer ring, which the square cuts."""
    if size % 2 == 0:
        return lambda r: min(2 * r, 2) if r == last else 2 * r
    return lambda r: 0 if r == 0 else min(2 * r, 2 if r == size // 2 else 2 * r - (r + 1) % 2)


@dataclass(frozen=True)
class KernelElement:
    """Which harmonic on which ring a sampled kernel is."""

    ring: float
    frequency: int


@cache
def irrep_kernels(inp: Irrep, out: Irrep, grid: KernelGrid) -> tuple[np.ndarray, tuple[KernelElement, ...]]:
    """Sampled kernels [n, d_out, d_in, k, k] between two irreps, normalised to ‖K‖² = d_out.

    With this normalisation a unit-variance white input gives outputs of unit variance per component. Harmonics that
    vanish at every tap are left out.
    """
    x, y = grid.points()
    radius, angle = np.hypot(x, y), np.arctan2(y, x) - REFLECTION_AXIS
    kernels, labels = [], []
    for ring, width, highest in zip(grid.rings, grid.widths, grid.frequencies):
        profile = np.exp(-((radius - ring) ** 2) / (2 * width**2))
        for m in range(highest + 1):
            # A harmonic of positive frequency has no value at the origin other than zero.
            wave = np.stack([np.cos(m * angle), np.sin(m * angle)]) * profile * ((radius > 1e-9) | (m == 0))
            for coefficients in angular_solutions(inp, out, m):
                kernel = np.einsum("coi,cyx->oiyx", coefficients, wave)
                norm = math.sqrt(np.sum(kernel**2) / out.dim)
                if norm > 1e-6:
                    kernels.append(kernel / norm)
                    labels.append(KernelElement(ring, m))
    shape = (0, out.dim, inp.dim, grid.size, grid.size)
    return (np.stack(kernels) if kernels else np.zeros(shape)), tuple(labels)
