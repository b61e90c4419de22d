"""The first layer of every network: whatever the data holds, what leaves has norm ≤ X₀ and is finite.

There is no clipping further on to catch a bad record, so it is caught here: entries that are NaN or infinite count as
zero, norms that overflow send the record to zero, and a record of the wrong shape is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from erlangen.lipschitz.base import Activation, LipschitzLayer

#: matrices from RGB, rows are the new channels
_LINEAR: dict[str, list[list[float]]] = {
    "grayscale": [[0.299, 0.587, 0.114]],
    "yiq": [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]],
    "yuv": [[0.299, 0.587, 0.114], [-0.14713, -0.28886, 0.436], [0.615, -0.51499, -0.10001]],
}
COLOURS = ("rgb", "hsv", *_LINEAR)

#: the projection aims a little inside the ball, so that rounding in float32 stays inside
_INSIDE = 1.0 - 1e-5


class BoundedInput(LipschitzLayer):
    """Projects each sample onto the ball (or the sphere) of radius ``bound``: x ↦ Π(scale·(x − its own mean)).

    ``shape`` is that of one sample. Before the projection come an optional change of ``colour``, an optional
    subtraction of each channel's own mean (``centre``: bright and dark images differ in nothing else, and the mean
    would use up most of the norm) and a multiplication by ``scale``. All of it is fixed and acts on each sample alone,
    so it costs no privacy. In ``mode="ball"`` and a linear colour space it has a Lipschitz constant, and predictions
    have certified radii; otherwise they do not.
    """

    def __init__(
        self, shape: tuple[int, ...], bound: float, mode: str = "ball", colour: str = "rgb", *, centre: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if mode not in ("ball", "sphere"):
            raise ValueError(f"mode is {mode!r}; choose 'ball' (norms are cut) or 'sphere' (norms are set)")
        if colour not in COLOURS:
            raise ValueError(f"colour is {colour!r}; choose one of {', '.join(COLOURS)}")
        if colour != "rgb" and (len(shape) != 3 or shape[0] != 3):
            raise ValueError(f"colour {colour!r} needs samples of shape (3, height, width), not {tuple(shape)}")
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound is {bound!r}; the radius X₀ must be a positive, finite number")
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale is {scale!r}; it must be a positive, finite number")
        if centre and len(shape) < 2:
            raise ValueError(f"samples of shape {tuple(shape)} have no positions to take a mean over; use centre=False")
        self.shape, self.bound, self.mode, self.colour = tuple(shape), float(bound), mode, colour
        self.centre, self.scale = centre, float(scale)

    @property
    def reach(self) -> float:
        """The norm of a raw sample at which the projection begins to act (in RGB, uncentred)."""
        return self.bound / self.scale

    def output_shape(self, x: Activation) -> tuple[int, ...]:
        return (1, *self.shape[1:]) if self.colour == "grayscale" else self.shape

    def propagate_input(self, x: Activation) -> Activation:
        return x.to(self.output_shape(x), self.bound * x.rounded)

    def jacobian_bound(self, x: Activation) -> float:
        if self.mode == "sphere" or self.colour == "hsv":
            return math.inf
        if self.colour == "rgb":
            return self.scale * x.rounded
        change = torch.linalg.matrix_norm(torch.tensor(_LINEAR[self.colour], dtype=torch.float64), 2)
        return self.scale * float(change) * x.rounded

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            found = tuple(x.shape[1:])
            raise ValueError(f"samples have shape {found}; this network was built and bounded for {self.shape}")
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = converted(_finite(x), self.colour)
            if self.centre:
                mean = x.mean(tuple(range(2, x.ndim)), keepdim=True)
                x = x - mean if x.requires_grad else x.sub_(mean)
            each, entries = (-1, *[1] * (x.ndim - 1)), tuple(range(1, x.ndim))
            # dividing by the largest entry first keeps the squares in range (not finite where the mean overflowed)
            largest = torch.maximum(x.amax(entries), -x.amin(entries)).clamp(min=1e-30)
            unit = _times(x, (1.0 / largest).view(each))
            # rows of an image in float32, their norms in float64: rounding stays far below what `_INSIDE` leaves
            lines = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
            norm = torch.linalg.vector_norm(lines, dim=entries, dtype=torch.float64).clamp(min=1e-30)
            target = self.bound * _INSIDE / norm
            scale = target if self.mode == "sphere" else torch.minimum(largest.double() * self.scale, target)
            return _finite(_times(unit, scale.to(x.dtype).view(each)), own=True)

    def extra_repr(self) -> str:
        centred = ", centred" if self.centre else ""
        return (
            f"{self.shape}, bound={self.bound:g}, mode={self.mode}, colour={self.colour}, scale={self.scale:g}{centred}"
        )


def _finite(x: Tensor, own: bool = False) -> Tensor:
    """Zero where an entry is NaN or infinite; in place if the tensor is the caller's ``own`` and no gradient needs it."""
    if own and not x.requires_grad:
        return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x·factor, in the memory of ``x`` where no gradient needs it: large images are made once, not five times."""
    return x * factor if x.requires_grad else x.mul_(factor)


def converted(x: Tensor, colour: str) -> Tensor:
    """RGB images [n, 3, H, W] in another colour space."""
    if colour == "rgb":
        return x
    if colour == "hsv":
        return _hsv(x)
    return torch.einsum("cd,ndhw->nchw", x.new_tensor(_LINEAR[colour]), x)


def _hsv(x: Tensor) -> Tensor:
    """Hue in [0, 1), saturation and value, of images in [0, 1] (other values are clamped)."""
    r, g, b = x.clamp(0.0, 1.0).unbind(1)
    value, least = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    span = value - least
    safe = span.clamp(min=1e-12)
    sector = torch.where(value == r, (g - b) / safe, torch.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4))
    hue = torch.where(span > 0, (sector / 6) % 1.0, torch.zeros_like(sector))
    return torch.stack((hue, span / value.clamp(min=1e-12), value), 1)
