"""Geometries of a user that leave directions out: what they do not see must not reach the sum at full size."""

from __future__ import annotations

import math

import pytest
import torch

from erlangen.mechanisms import Diagonal, GaussianMechanism, Geometry
from erlangen.mechanisms.geometry import GUARD

SHAPE = torch.Size((4, 6))
BOUND = 0.7


class Projection(Geometry):
    """T = s·Q with k orthonormal rows Q of a random rotation."""

    def __init__(self, kept=12, scale=1.0):
        g = torch.Generator().manual_seed(5)
        self.q = torch.linalg.qr(torch.randn(24, 24, generator=g, dtype=torch.float64))[0].T[:kept]
        self.scale = scale

    def weight(self, name):
        return lambda g: self.forward(name, g)

    def forward(self, name, g):
        return self.scale * g.flatten(-2) @ self.q.T.to(g)

    def inverse(self, name, c):
        return (c / self.scale @ self.q.to(c)).unflatten(-1, SHAPE)


class PublicMask(Geometry):
    """T keeps the even columns."""

    mask = torch.tensor([1.0, 0.0]).repeat(3).expand(SHAPE)

    def weight(self, name):
        return self.mask

    def forward(self, name, g):
        return g * self.mask.to(g)

    def inverse(self, name, c):
        return c * self.mask.to(c)


def mechanism(geometry):
    made = GaussianMechanism(0.0, BOUND, geometry)
    made.bind({"w": torch.zeros(SHAPE)})
    return made


@pytest.mark.parametrize("size", [1e4, 1e8, 1e20, 1e37])
@pytest.mark.parametrize("geometry", [Projection(), Projection(23), Projection(6, 50.0), PublicMask()])
def test_a_record_outside_the_kept_directions_moves_the_release_by_no_more_than_the_bound(geometry, size):
    others = BOUND * torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(0)) / 5
    x = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hidden = (size * (x - geometry.inverse("w", geometry.forward("w", x)))).float()
    made = mechanism(geometry)
    before, after = (made.release({"w": g})["w"].double() for g in (others, torch.cat([others, hidden])))
    assert float(geometry.forward("w", after - before).norm()) <= BOUND * (1 + 1e-5)


def test_what_a_projection_keeps_is_clipped_as_before():
    geometry = Projection()
    inside = geometry.inverse("w", torch.randn(5, 12, generator=torch.Generator().manual_seed(2)) * 10)
    seen = geometry.forward("w", inside)
    expected = geometry.inverse("w", (seen * (BOUND / seen.norm(dim=1))[:, None]).sum(0))
    torch.testing.assert_close(mechanism(geometry).release({"w": inside})["w"], expected, rtol=GUARD**2, atol=1e-6)


def test_a_geometry_that_removes_nothing_is_measured_by_its_own_weight():
    whole = Projection(24)
    g = torch.randn(3, *SHAPE)
    assert mechanism(whole).metric("w")(g).shape == (3, 24)
    diagonal = Diagonal({"w": torch.rand(SHAPE) + 0.5})
    assert mechanism(diagonal).metric("w") is diagonal.weight("w")
    half = mechanism(Projection()).metric("w")(g.double()).norm(dim=1)
    kept, all_of_it = Projection().forward("w", g.double()).norm(dim=1), g.double().flatten(1).norm(dim=1)
    torch.testing.assert_close(half, (kept.square() + (GUARD * all_of_it).square()).sqrt())
    assert math.isclose(float(mechanism(PublicMask()).metric("w")[0, 1]), GUARD, rel_tol=0.5)


class Squashed(Projection):
    """T = diag(1, …, 1, 1/stretch)·Q: one direction is seen by next to nothing."""

    def __init__(self, stretch, scale=1.0):
        super().__init__(24, scale)
        self.gains = torch.ones(24, dtype=torch.float64)
        self.gains[-1] = 1 / stretch

    def forward(self, name, g):
        return super().forward(name, g) * self.gains.to(g)

    def inverse(self, name, c):
        return super().inverse(name, c / self.gains.to(c))


class Unguarded(Squashed):
    """The broken twin, as it was: nothing is removed, so nothing is watched."""

    guarded = True


def excess(geometry, size):
    """By how much one record along the squashed direction moves the release, in multiples of the bound."""
    others = BOUND * torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(0)) / 5
    hidden = (size * BOUND * geometry.q[-1]).float().view(1, *SHAPE)
    made = mechanism(geometry)
    before, after = (made.release({"w": g})["w"].double() for g in (others, torch.cat([others, hidden])))
    return float(geometry.forward("w", after - before).norm()) / BOUND


@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("stretch", [1e3, 1e6, 1e9, 1e11])
def test_a_record_along_a_squashed_direction_absorbs_nobody(stretch, scale):
    for size in (1.0, 0.9 * stretch / scale, 1e4 * stretch, 1e20):
        assert excess(Squashed(stretch, scale), size) <= 1 + 1e-3
    if stretch >= 1e9:
        twin = Unguarded(stretch, scale)
        worst = max(excess(twin, share * stretch / scale) for share in (0.9, 0.93, 0.96, 0.99))
        assert worst > 1.05, "the attack works where nothing stands against it"


def test_a_geometry_that_stretches_little_is_measured_by_its_own_weight():
    g = torch.randn(3, *SHAPE)
    assert mechanism(Squashed(30.0)).metric("w")(g).shape == (3, 24)
    watched = mechanism(Squashed(1e6)).metric("w")(g.double()).norm(dim=1)
    seen = Squashed(1e6).forward("w", g.double()).norm(dim=1)
    assert bool((watched >= seen).all())
    torch.testing.assert_close(watched, seen, rtol=1e-6, atol=0.0)
