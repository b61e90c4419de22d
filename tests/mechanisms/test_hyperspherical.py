"""Hyperspherical coordinates: the paper's formulas, exact inverses, zeros, extreme scales, ten million dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erlangen.mechanisms import hyperspherical
from erlangen.mechanisms.diagnostics import gradient_error
from erlangen.mechanisms.hyperspherical import (
    angle_blocks,
    angle_difference,
    canonical,
    from_spherical,
    to_spherical,
)


def to_paper(phi: torch.Tensor) -> torch.Tensor:
    """θ of GeoDP's Eq. 25 from φ, and back (the map is its own inverse)."""
    return torch.cat([math.pi / 2 - phi[..., :-1], phi[..., -1:]], -1)


def paper_inverse(radius: float, theta: torch.Tensor) -> torch.Tensor:
    """Eq. 27, one coordinate after the other."""
    g, product = [], radius
    for t in theta.tolist():
        g.append(product * math.cos(t))
        product *= math.sin(t)
    return torch.tensor([*g, product], dtype=torch.float64)


entries = st.floats(-5, 5).map(lambda v: v if abs(v) > 1e-100 else 0.0)


@given(st.lists(entries, min_size=2, max_size=9))
@settings(max_examples=200, deadline=None)
def test_round_trip_and_equation_27(values):
    g = torch.tensor(values, dtype=torch.float64)
    radius, phi = to_spherical(g)
    assert float(radius) == pytest.approx(float(g.norm()), rel=1e-12, abs=1e-300)
    assert float((from_spherical(radius, phi) - g).norm()) <= 1e-12 * float(g.norm())
    assert float((paper_inverse(float(radius), to_paper(phi)) - g).norm()) <= 1e-11 * float(g.norm()) + 1e-300
    assert torch.equal(to_paper(to_paper(phi)), phi) or torch.allclose(to_paper(to_paper(phi)), phi)
    assert float(phi[:-1].abs().max() if phi.numel() > 1 else 0.0) <= math.pi / 2 + 1e-12


def test_the_papers_three_dimensional_example():
    g = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    _, phi = to_spherical(g)
    theta = to_paper(phi)
    assert float(theta[0]) == pytest.approx(math.atan2(math.hypot(-1.0, 2.0), 0.3))
    assert float(theta[1]) == pytest.approx(math.atan2(2.0, -1.0))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_scale(scale, dtype):
    g = torch.randn(4, 300, dtype=dtype) * scale
    g[:, ::7] = 0.0
    back = from_spherical(*to_spherical(g))
    error = ((back.double() - g.double()) / scale).norm(dim=1) / (g.double() / scale).norm(dim=1)
    assert float(error.max()) < (1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("where", [0, 5, 8, 9])
def test_axes_and_zero(where):
    for sign in (1.0, -1.0):
        g = torch.zeros(10)
        g[where] = sign
        torch.testing.assert_close(from_spherical(*to_spherical(g)), g, atol=1e-6, rtol=0)
    radius, phi = to_spherical(torch.zeros(10))
    assert float(radius) == 0.0
    assert bool(torch.isfinite(phi).all())
    assert float(from_spherical(radius, phi).abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_have_no_sign(dtype):
    """atan2(−0, −0) is −π: a vector that ends in such zeros would be half a turn from its twin."""
    g = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.5, -2.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    negative = torch.where(g == 0, -0.0, g)
    _, want = to_spherical(g)
    torch.testing.assert_close(to_spherical(negative)[1], want, rtol=0, atol=0)
    for columns, phi, _ in angle_blocks([negative], negative.norm(dim=1)):
        torch.testing.assert_close(phi, want[:, columns])
    assert gradient_error(negative[0], g[0]).direction_mse == 0.0


def test_wide_dynamic_range_inside_one_vector():
    g = torch.tensor([1e30, 1.0, -1e-30, 0.0, 3e29])
    back = from_spherical(*to_spherical(g))
    assert float((back.double() - g.double()).norm() / g.double().norm()) < 1e-6


def test_angles_beyond_their_range_come_back_with_the_right_sign():
    """Noise may push cos φ below zero; the product keeps count of the signs."""
    phi = torch.tensor([2.0, -2.5, 0.3, 4.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(from_spherical(torch.tensor(-1.5), phi), paper_inverse(-1.5, to_paper(phi)))


def test_batches_are_rows():
    g = torch.randn(3, 4, 17)
    radius, phi = to_spherical(g)
    assert radius.shape == (3, 4)
    assert phi.shape == (3, 4, 16)
    one = to_spherical(g[1, 2])
    torch.testing.assert_close(phi[1, 2], one[1])
    with pytest.raises(ValueError, match="d ≥ 2"):
        to_spherical(torch.ones(1))


@pytest.mark.parametrize("widths", [(2,), (1, 1), (1, 5, 1), (7, 1, 30), (3, 2, 40, 1, 1), (5000, 3000)])
@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_blocks_of_columns_are_the_whole_conversion(widths, block, monkeypatch):
    """Whatever the parts and the block size; with zeros, and with large and small angles."""
    monkeypatch.setitem(hyperspherical.BLOCK, "cpu", block * 4 if sum(widths) < 100 else 1 << 12)
    g = torch.randn(4, sum(widths)) * torch.tensor([[1.0], [1e20], [1e-20], [0.0]])
    g[0, ::3] = 0.0
    _, want = to_spherical(g)
    got, seen = torch.full_like(want, math.nan), 0
    for columns, phi, reach in angle_blocks(g.split(widths, 1), g.norm(dim=1).nan_to_num(posinf=1e20)):
        got[:, columns] = phi
        assert float(phi.abs().max()) <= reach * (1 + 1e-6)
        seen += phi.shape[1]
    assert seen == want.shape[1]
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)


def test_canonical_angles_are_the_same_direction():
    phi = torch.tensor([0.3, -1.2, 0.1, 7.0], dtype=torch.float64)
    for shift in (0.0, 2.0):
        moved = phi + torch.tensor([shift, 0, 0, 0], dtype=torch.float64)
        inside = canonical(moved)
        assert float(inside[:-1].abs().max()) <= math.pi / 2
        assert abs(float(inside[-1])) <= math.pi
        one = torch.ones((), dtype=torch.float64)
        torch.testing.assert_close(from_spherical(one, inside), from_spherical(one, moved))


def test_the_last_angle_goes_the_short_way_round():
    a, b = torch.tensor([0.1, 3.1]), torch.tensor([0.2, -3.1])
    torch.testing.assert_close(angle_difference(a, b), torch.tensor([-0.1, 6.2 - 2 * math.pi]))


def all_float32(g: torch.Tensor) -> torch.Tensor:
    """The broken twin: the same formulas, accumulated in float32, one after the other."""
    tail = g.square().flip(-1).cumsum(-1, dtype=torch.float32).flip(-1).sqrt()
    theta = torch.acos((g[:-1] / tail[:-1]).clamp(-1, 1))
    product = torch.cat([torch.ones(1), theta.sin().cumprod(-1)])
    return tail[0] * torch.cat([product[:-1] * theta.cos(), product[-1:]])


def test_a_million_dimensions_and_the_all_float32_twin():
    g = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    back = from_spherical(*to_spherical(g))
    assert float((back - g).norm() / g.norm()) < 2e-7
    assert float((all_float32(g) - g).norm() / g.norm()) > 1e-3


@pytest.mark.slow
def test_ten_million_dimensions():
    g = torch.randn(10_000_000)
    back = from_spherical(*to_spherical(g))
    assert float((back - g).norm() / g.norm()) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_a_gpu_says_the_same(scale):
    g = torch.randn(3, 100_000) * scale
    g[:, ::3] = 0.0
    radius, phi = to_spherical(g.cuda())
    torch.testing.assert_close(phi.cpu(), to_spherical(g)[1], rtol=2e-6, atol=1e-7)
    back = from_spherical(radius, phi).cpu().double()
    assert float((back - g.double()).norm() / g.double().norm()) < 1e-6
    blocks = list(angle_blocks([g.cuda()[:, :70_000], g.cuda()[:, 70_000:]], radius))
    got = torch.empty_like(phi)
    for columns, part, _ in blocks:
        got[:, columns] = part
    torch.testing.assert_close(got, phi, rtol=2e-6, atol=1e-7)
