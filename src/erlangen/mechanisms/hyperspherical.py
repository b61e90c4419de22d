"""Hyperspherical coordinates in O(d), stable to ten million dimensions.

GeoDP's Eq. 25 has angles θ_z = atan2(R_{z+1}, g_z), R_z = ‖(g_z, …, g_d)‖. In high dimension they all crowd at π/2,
where a float32 resolves 1e-7. The complementary angles φ_z = π/2 − θ_z = atan2(g_z, R_{z+1}) sit at 0 instead and keep
their relative precision. The last angle, atan2(g_d, g_{d−1}), is the paper's own.

Forwards, R² is a reversed cumulative sum of squares in float64, of the vector divided by its largest entry. Backwards,
Π cos φ is the exponential of a cumulative sum of logarithms, its sign the parity of the negative cosines: noise may
have pushed an angle beyond ±π/2. Zeros are safe: atan2(0, 0) = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def to_spherical(g: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] → (‖g‖ [...], φ [..., d−1]), d ≥ 2, in g's precision (computed in float64)."""
    if g.shape[-1] < 2:
        raise ValueError(f"a vector of {g.shape[-1]} entries has no direction in angles; hyperspherical needs d ≥ 2")
    scale = g.abs().amax(-1, keepdim=True).double()
    x = g.double() / torch.where(scale > 0, scale, 1.0)
    tail = x.square().flip(-1).cumsum_(-1).flip(-1).sqrt_()  # tail[z] = R_z
    radius = (tail[..., 0] * scale[..., 0]).to(g.dtype)
    phi = torch.empty(*g.shape[:-1], g.shape[-1] - 1, dtype=g.dtype, device=g.device)
    phi[..., :-1] = torch.atan2(x[..., :-2], tail[..., 1:-1])
    phi[..., -1] = torch.atan2(x[..., -1], x[..., -2])
    return radius, phi


def from_spherical(radius: Tensor, phi: Tensor) -> Tensor:
    """(‖g‖ [...], φ [..., d−1]) → g [..., d]. The radius may be negative and the angles anything (noise)."""
    a = phi.double()
    cos, sin = a[..., :-1].cos(), a[..., :-1].sin()
    # log|cos φ| by its sine where that is the precise one; −inf at cos φ = 0, which exp takes to an exact 0
    logs = torch.where(sin.square() < 0.5, 0.5 * torch.log1p(-sin.square()), cos.abs().log())
    sign = 1.0 - 2.0 * ((cos < 0).cumsum(-1) % 2)
    before = torch.nn.functional.pad(logs.cumsum(-1).exp() * sign, (1, 0), value=1.0)  # Π_{i<z} cos φ_i
    last = before[..., -1:]
    g = torch.cat([before[..., :-1] * sin, last * a[..., -1:].cos(), last * a[..., -1:].sin()], -1)
    return (g * radius.double()[..., None]).to(phi.dtype)


def to_paper(phi: Tensor) -> Tensor:
    """θ of GeoDP's Eq. 25 from φ, and back (the map is its own inverse)."""
    return torch.cat([math.pi / 2 - phi[..., :-1], phi[..., -1:]], -1)


def angle_difference(a: Tensor, b: Tensor) -> Tensor:
    """a − b, the last angle taken the short way round."""
    difference = a - b
    difference[..., -1] = torch.remainder(difference[..., -1] + math.pi, 2 * math.pi) - math.pi
    return difference
