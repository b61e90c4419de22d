"""The coordinates in which gradients are clipped and noised.

A geometry is an invertible (or projecting) linear map T per parameter, fixed before training and independent of data.
Gradients are clipped by ‖T g‖; the sum of raw gradients is mapped once, noised isotropically, and mapped back by T⁺. The
released covariance is therefore s²·T⁺T⁺ᵀ for noise of standard deviation s, and the sensitivity is that of the clip.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from erlangen.gradients.filtered import KernelFilter
from erlangen.gradients.pieces import Weight

#: the largest parameter whose energy is measured, d² numbers in all
MEASURED = 16_384

#: how much of what T removes counts beside ‖T g‖; see `Geometry.measure`
GUARD = 1.0 / 64.0

#: by how much a geometry may stretch before huge terms of a sum are kept away too; see `Geometry.measure`
STRETCH = 1e3


class Geometry:
    """Identity: the Euclidean norm. Subclasses change the coordinates."""

    #: whether T removes nothing and stretches little, or `weight` counts what it does not see
    guarded = False

    def bind(self, shapes: Mapping[str, torch.Size]) -> None:
        """Learn the parameters' shapes; raise if this geometry does not fit them."""

    def weight(self, name: str) -> Weight:
        """How a layer rule measures ‖T g‖ without forming T g: None, a diagonal, or a function of the gradients."""
        return None

    def measure(self, name: str, like: Tensor) -> Weight:
        """`weight`, with κs‖g‖ beside it where gradients may be far longer than T sees them; s is the scale of T.

        Raw gradients are summed before they are mapped. A huge one of which T sees nothing would pass the clip, and absorb the
        others in floating point. With κ = 1/64 no term of the sum is above 64·C/s, and a gradient of which T removes nothing is
        clipped by a part in eight thousand more. The same of one of which T sees next to nothing: κ = 1e-3 where T⁻¹ may stretch
        by more than 1e3. (A diagonal T needs no such thing: every coordinate is rounded by itself.)
        """
        weight = self.weight(name)
        if weight is None or self.guarded or isinstance(weight, KernelFilter):
            return weight
        known: dict[tuple[str, torch.Size], float] = self.__dict__.setdefault("_shares", {})
        if (name, like.shape) not in known:
            known[name, like.shape] = self._share(name, like, isinstance(weight, Tensor))
        share = known[name, like.shape]
        return _guarded(weight, share) if share else weight

    def _share(self, name: str, like: Tensor, diagonal: bool) -> float:
        """κs, asked of T by random vectors: of one it removes a part if of any, and eight show how much it stretches."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(like.shape, generator=g, dtype=torch.float64).to(like.device)
        seen = self.forward(name, x)
        back = self.inverse(name, seen)
        if not bool((back - x).norm() <= 1e-6 * x.norm()):
            return GUARD * (float(seen.norm() / back.norm()) if bool(back.any()) else 1.0)
        if diagonal:
            return 0.0
        scale = float(seen.norm() / x.norm())
        white = torch.randn(8, *seen.shape, generator=g, dtype=torch.float64).to(like.device)
        # a white vector comes back longer than a third of what T⁻¹ stretches most, but for one in four
        stretch = 3 * max(float(self.inverse(name, one).norm()) for one in white)
        return scale / STRETCH if scale * stretch > STRETCH else 0.0

    def forward(self, name: str, g: Tensor) -> Tensor:
        """T g, for gradients with any leading dimensions."""
        return g

    def inverse(self, name: str, c: Tensor) -> Tensor:
        """T⁺ c"""
        return c

    def energy(self, name: str, like: Tensor) -> Tensor | float:
        """Per-coordinate variance of T⁺z for white z of variance 1 (the diagonal of T⁺T⁺ᵀ).

        A geometry that does not say is asked one unit vector at a time, once, if the parameter is small.
        """
        if type(self).inverse is Geometry.inverse:
            return 1.0
        known: dict[str, Tensor] = self.__dict__.setdefault("_measured_energy", {})
        if name not in known:
            known[name] = self._measured(name, like)
        return known[name].to(like)

    def _measured(self, name: str, like: Tensor) -> Tensor:
        """Σ_k (T⁺e_k)², in parts of a few million numbers."""
        coordinates = self.forward(name, torch.zeros_like(like, dtype=torch.float64)).shape
        count = coordinates.numel()
        if count > MEASURED:
            raise NotImplementedError(
                f"{type(self).__name__} does not say how large its noise is on the {count:,} coordinates of {name!r}, too many to "
                "measure: define energy(name, like), the diagonal of T⁺T⁺ᵀ"
            )
        total, part = torch.zeros(like.shape, dtype=torch.float64, device=like.device), max(1, 4_000_000 // count)
        for first in range(0, count, part):
            rows = min(part, count - first)
            units = torch.zeros(rows, count, dtype=torch.float64, device=like.device)
            units[torch.arange(rows), first + torch.arange(rows)] = 1.0
            total += self.inverse(name, units.view(rows, *coordinates)).square().sum(0)
        return total

    def covariance_words(self, std: float) -> str:
        """The released covariance for people."""
        shape = "I" if type(self) is Geometry else f"T⁺T⁺ᵀ, T = {type(self).__name__}"
        return f"{std**2:.4g}·{shape}"


def _guarded(weight: Weight, share: float) -> Weight:
    """The coordinates of a weight, and ``share``·g beside them."""
    if isinstance(weight, Tensor):
        return (weight.square() + share**2).sqrt()
    assert weight is not None

    def both(g: Tensor) -> Tensor:
        seen = weight(g).flatten(1)
        return torch.cat([seen, g.flatten(1).to(seen) * share], 1)

    return both


class Diagonal(Geometry):
    """T = diag(1/m): coordinates with a large m are clipped less and noised more. m must not depend on the data.

    A single number serves all coordinates of its parameter.
    """

    guarded = True

    def __init__(self, m: Mapping[str, Tensor | float]) -> None:
        given = {name: t if isinstance(t, Tensor) else torch.tensor(float(t)) for name, t in m.items()}
        for name, t in given.items():
            if not bool(torch.isfinite(t).all()) or bool((t <= 0).any()):
                raise ValueError(
                    f"the metric of {name!r} has entries that are not positive and finite: min {float(t.min())}"
                )
        self.m = {name: t.detach().clone() for name, t in given.items()}
        self._inverse = {name: 1.0 / t for name, t in self.m.items()}

    def bind(self, shapes: Mapping[str, torch.Size]) -> None:
        for name, shape in shapes.items():
            if name not in self.m:
                raise ValueError(
                    f"the metric has no entry for parameter {name!r}; give one positive number per coordinate"
                )
            if not self.m[name].ndim:
                self.m[name], self._inverse[name] = (t.expand(shape).clone() for t in (self.m[name], self._inverse[name]))
            if self.m[name].shape != shape:
                raise ValueError(f"the metric of {name!r} has shape {tuple(self.m[name].shape)}, not {tuple(shape)}")

    def weight(self, name: str) -> Weight:
        return self._inverse[name]

    def forward(self, name: str, g: Tensor) -> Tensor:
        return g * self._inverse[name].to(g)

    def inverse(self, name: str, c: Tensor) -> Tensor:
        return c * self.m[name].to(c)

    def energy(self, name: str, like: Tensor) -> Tensor | float:
        return self.m[name].to(like).square()

    def covariance_words(self, std: float) -> str:
        low, high = min(float(t.min()) for t in self.m.values()), max(float(t.max()) for t in self.m.values())
        return f"{std**2:.4g}·diag(m²), m from {low:.4g} to {high:.4g}"
