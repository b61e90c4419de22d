"""Hyperspherical coordinates in O(d), stable to ten million dimensions.

GeoDP's Eq. 25 has angles θ_z = atan2(R_{z+1}, g_z), R_z = ‖(g_z, …, g_d)‖. In high dimension they all crowd at π/2,
where a float32 resolves 1e-7. The complementary angles φ_z = π/2 − θ_z = atan2(g_z, R_{z+1}) sit at 0 instead and keep
their relative precision. The last angle, atan2(g_d, g_{d−1}), is the paper's own.

Forwards, R² is a reversed cumulative sum of squares in float64, of the vector divided by a number of its own size.
Backwards, Π cos φ is a cumulative product in float64; its factors may be negative, because noise may have pushed an
angle beyond ±π/2. Zeros are safe, whatever their sign: the angle of nothing is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Entries worked on at a time by `angle_blocks`: temporaries that stay in a processor's cache.
BLOCK = {"cpu": 1 << 18}
LARGE_BLOCK = 1 << 23

# Below these tangents three terms, or two, of the arctangent's series are exact to float32.
SMALL, TINY = 0.05, 0.015


def to_spherical(g: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] → (‖g‖ [...], φ [..., d−1]), d ≥ 2, in g's precision; the sum of squares runs in float64."""
    if g.shape[-1] < 2:
        raise ValueError(f"a vector of {g.shape[-1]} entries has no direction in angles; hyperspherical needs d ≥ 2")
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    scale = g.abs().amax(-1)[..., None]
    x = g / torch.where(scale > 0, scale, 1.0)
    squares = x.square().flip(-1).double().cumsum_(-1).flip(-1)  # R_z²
    radius = squares[..., 0].sqrt() * scale[..., 0].double()
    phi = torch.atan2(x[..., :-1], squares[..., 1:].to(g.dtype).sqrt_())
    phi[..., -1] = _last(x[..., -1], x[..., -2])
    return radius.to(g.dtype), phi


def _last(y: Tensor, x: Tensor) -> Tensor:
    """atan2 with zeros that have no sign: atan2(−0, −0) is −π, atan2(0, 0) is 0."""
    return torch.atan2(y + 0.0, x + 0.0)


def angle_blocks(parts: Sequence[Tensor], scale: Tensor) -> Iterator[tuple[slice, Tensor, float]]:
    """The angles of n long vectors, given in parts [n, d_k], a few columns at a time and never all at once.

    Yields (columns, φ of these columns [n, width], a bound on |φ|) from the last columns to the first, because the
    radii R_z grow from the end. Together they are `to_spherical` of the concatenation. ``scale`` [n] is any number near
    each vector's norm; vectors of ordinary size are not divided by it.
    """
    empty = scale <= 0
    scale = torch.where(empty, 1.0, scale)[:, None].to(parts[0])
    ordinary = bool(((scale > 1e-12) & (scale < 1e12)).all())
    ends = torch.cat([p[:, -2:] for p in parts], 1)[:, -2:]
    ends = ends if ordinary else ends / scale
    yield slice(-1, None), _last(ends[:, 1:], ends[:, :1]), math.pi
    left, stop = 2, sum(p.shape[1] for p in parts) - 2
    carry = torch.where(empty, 1.0, ends.double().square().sum(1))  # angles of nothing are 0, whatever the radius
    width = max(1, BLOCK.get(parts[0].device.type, LARGE_BLOCK) // max(1, parts[0].shape[0]))
    for part in reversed(parts):
        skip = min(left, part.shape[1])  # the last two columns are done
        left -= skip
        for high in range(part.shape[1] - skip, 0, -width):
            low = max(0, high - width)
            x = part[:, low:high] if ordinary else part[:, low:high] / scale
            phi, carry, reach = _block(x, carry)
            yield slice(stop - (high - low), stop), phi, reach
            stop -= high - low


def _block(x: Tensor, carry: Tensor) -> tuple[Tensor, Tensor, float]:
    """φ of consecutive columns, given R² of what follows them: (φ, R² with them, a bound on |φ|)."""
    if x.is_cpu and x.dtype == torch.float32:
        squares = x.square()
        prefix = squares.cumsum(1)
        total = carry + prefix[:, -1].double()
        # what follows outweighs the block: float32 resolves R² to the precision of φ, and R² ≥ carry > 0
        if bool((total < 2 * carry).all()):
            t = torch.sub(total.float()[:, None], prefix).rsqrt_().mul_(x)
            low, high = torch.aminmax(t)
            reach = max(-float(low), float(high))
            if reach < SMALL:
                q = torch.mul(t, t, out=squares)
                if reach > TINY:
                    return t.addcmul_(t, q.mul(0.2).sub_(1 / 3).mul_(q)), total, reach  # t − t³/3 + t⁵/5
                return t.addcmul_(t, q, value=-1 / 3), total, reach
    tails = torch.empty(x.shape[0], x.shape[1] + 1, dtype=torch.float64, device=x.device)
    tails[:, 0] = carry
    tails[:, 1:].copy_(x.flip(1)).square_()
    tails.cumsum_(1)  # R² of the column before: the carry and what came since
    radii = tails[:, :-1].to(x.dtype).sqrt_().flip(1)
    return torch.atan2(x, radii), tails[:, -1].clone(), math.pi / 2


def from_spherical(radius: Tensor, phi: Tensor) -> Tensor:
    """(‖g‖ [...], φ [..., d−1]) → g [..., d]. The radius may be negative and the angles anything (noise).

    A factor in float64 errs by 1e-16, ten million of them together by 1e-9.
    """
    a = phi.double()
    before = torch.nn.functional.pad(a[..., :-1].cos().cumprod(-1), (1, 0), value=1.0)  # Π_{i<z} cos φ_i
    sin = a[..., :-1].sin()
    last = before[..., -1:]
    g = torch.cat([before[..., :-1] * sin, last * a[..., -1:].cos(), last * a[..., -1:].sin()], -1)
    return (g * radius.double()[..., None]).to(phi.dtype)


def canonical(phi: Tensor) -> Tensor:
    """The same direction with every angle in its range, whatever noise did to it."""
    return wrapped(phi, from_spherical(torch.ones_like(phi[..., 0]), phi))


def wrapped(phi: Tensor, direction: Tensor) -> Tensor:
    """`canonical`, where the direction is known already."""
    if bool((phi[..., :-1].abs() <= math.pi / 2).all()):
        return angle_difference(phi, torch.zeros_like(phi))
    return to_spherical(direction)[1]


def angle_difference(a: Tensor, b: Tensor) -> Tensor:
    """a − b, the last angle taken the short way round."""
    difference = a - b
    difference[..., -1] = torch.remainder(difference[..., -1] + math.pi, 2 * math.pi) - math.pi
    return difference
