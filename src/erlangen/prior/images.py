"""Images that nobody took: leaves that cover each other, plain, shaded or filled with random textures.

An image is a function of a seed, and no record takes part; what a network learns from them is as public as the seed. Edges,
corners, overlaps and textures at all scales are what such images share with photographs (dead leaves: Ruderman, 1997; Lee,
Mumford and Huang, 2001; as something to learn from: Baradad et al., 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: leaves of an image at most, and their radius as a part of the image's side
LEAVES, RADII = 24, (0.04, 0.5)
#: waves around a bent edge at most
WAVES = 5


def made_up_images(count: int, colours: int, side: int, generator: torch.Generator) -> Tensor:
    """``count`` images [n, colours, side, side] with pixels in [0, 1], on the device of ``generator``; crowded ones first."""
    draw, device = Draw(count, generator), generator.device
    fills = textures(count, colours, side, generator)
    image = _painted(draw, colours, fills)
    leaves = draw.uniform(0, math.log(LEAVES), 1).exp().flatten().sort(descending=True).values  # from one to many
    axis = (torch.arange(side, device=device) + 0.5) / side
    y, x = axis.view(1, -1, 1), axis.view(1, 1, -1)
    for k in range(LEAVES):
        draw = Draw(int((leaves > k).sum()), generator)
        u, v, radius = _placed(draw, x, y)
        fill = fills[torch.randint(count, (draw.count,), generator=generator, device=device)]
        painted, cover = _painted(draw, colours, fill, (u, v)), _cover(draw, u, v, radius * side)
        image[: draw.count] = torch.lerp(image[: draw.count], painted, cover.unsqueeze(1))
    return image.clamp_(0, 1)


class Draw:
    """Random numbers, one set for each image of a batch, shaped to meet its pixels."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator

    def uniform(self, low: float, high: float, width: int) -> Tensor:
        """[n, 1, 1] for a ``width`` of one, else [width, n, 1, 1]: one set after another."""
        u = torch.rand(width, self.count, 1, 1, generator=self.generator, device=self.generator.device)
        found = low + (high - low) * u
        return found[0] if width == 1 else found


def textures(count: int, colours: int, side: int, generator: torch.Generator) -> Tensor:
    """[n, colours, side, side], mostly between −1 and 1: clouds, contours of clouds, or bent gratings."""
    draw = Draw(count, generator)
    clouds = _clouds(draw, colours, side)
    bend = clouds.mean(1)
    axis = torch.arange(side, device=generator.device) / side
    angle, pitch = draw.uniform(0, math.pi, 1), draw.uniform(math.log(1.5), math.log(side / 4), 1).exp()
    across = angle.cos() * axis.view(1, 1, -1) + angle.sin() * axis.view(1, -1, 1)
    grating = (2 * math.pi * pitch * across + draw.uniform(0, 3, 1) * bend).sin().unsqueeze(1)
    contours = (draw.uniform(1, 6, 1).unsqueeze(1) * clouds).sin()
    kind = draw.uniform(0, 1, 1).unsqueeze(1)
    tint = 2 * torch.rand(count, colours, 1, 1, generator=generator, device=generator.device) - 1
    return torch.where(kind < 0.5, clouds / 2, torch.where(kind < 0.75, contours, grating * tint))


def _clouds(draw: Draw, colours: int, side: int) -> Tensor:
    """Noise of unit variance whose amplitude falls with a power of the frequency, stretched along some direction."""
    generator = draw.generator
    noise = torch.randn(draw.count, colours, side, side, generator=generator, device=generator.device)
    shared = draw.uniform(0, 1, 1).unsqueeze(1)  # from colours of their own to shades of one
    noise = torch.lerp(noise, noise[:, :1].expand_as(noise), shared)
    fy = torch.fft.fftfreq(side, device=generator.device).view(1, -1, 1)
    fx = torch.fft.rfftfreq(side, device=generator.device).view(1, 1, -1)
    angle, stretch, power = draw.uniform(0, math.pi, 1), draw.uniform(0, 3, 1).exp2(), draw.uniform(0.8, 3, 1)
    along = angle.cos() * fx + angle.sin() * fy
    across = stretch * (angle.cos() * fy - angle.sin() * fx)
    amplitude = (along**2 + across**2 + side**-2.0) ** (-power / 2)
    amplitude[:, 0, 0] = 0
    clouds = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude.unsqueeze(1), s=(side, side))
    return clouds / clouds.std((1, 2, 3), keepdim=True).clamp(min=1e-6)


def _placed(draw: Draw, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates in which a leaf, somewhere, turned and stretched, has radius one; and its radius."""
    radius = draw.uniform(math.log(RADII[0]), math.log(RADII[1]), 1).exp()
    (left, top), angle = draw.uniform(-0.1, 1.1, 2), draw.uniform(0, 2 * math.pi, 1)
    stretch = draw.uniform(-0.7, 0.7, 1).exp()
    dx, dy = x - left, y - top
    u = (angle.cos() * dx + angle.sin() * dy) / (radius * stretch)
    v = (angle.cos() * dy - angle.sin() * dx) * stretch / radius
    return u, v, radius


def _cover(draw: Draw, u: Tensor, v: Tensor, pixels: Tensor) -> Tensor:
    """How far a leaf covers each pixel: a box, an ellipse or a diamond, its edge bent by a few waves."""
    across, along, around = u.abs(), v.abs(), torch.hypot(u, v) + 1e-6
    kind = draw.uniform(0, 3, 1)
    distance = torch.where(kind < 1, torch.maximum(across, along), torch.where(kind < 2, around, across + along))
    cos, sin = u / around, v / around
    edge, wave_cos, wave_sin = torch.ones_like(u), cos, sin
    bent = (draw.uniform(0, 1, 1) < 0.5).float()
    sizes, phases = draw.uniform(-0.25, 0.25, WAVES - 1) * bent, draw.uniform(0, 2 * math.pi, WAVES - 1)
    for size, phase in zip(sizes, phases):  # cosines of two, three … times the angle, by the sum of angles
        wave_cos, wave_sin = wave_cos * cos - wave_sin * sin, wave_sin * cos + wave_cos * sin
        edge = edge + (size * phase.cos()) * wave_cos - (size * phase.sin()) * wave_sin
    return ((edge - distance) * pixels * 2).sigmoid()  # an edge as wide as a pixel


def _painted(draw: Draw, colours: int, fill: Tensor, at: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """A colour; half of the time with a texture, and shaded along some direction where a leaf lies."""
    generator = draw.generator
    tone = torch.rand(draw.count, colours, 1, 1, generator=generator, device=generator.device)
    grey, strength = draw.uniform(0, 1, 1).unsqueeze(1), draw.uniform(-0.4, 0.4, 1).clamp(min=0).unsqueeze(1)
    tone = torch.lerp(tone, tone.mean(1, keepdim=True).expand_as(tone), grey)
    if at is None:
        return tone + strength * fill
    slope = draw.uniform(-0.15, 0.15, 2)
    return tone + strength * fill + (slope[0] * at[0] + slope[1] * at[1]).unsqueeze(1)


__all__ = ["made_up_images", "textures"]
