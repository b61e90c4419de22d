"""Made-up images: pixels in range, the same for the same seed, and as natural images spread their energy over frequencies."""

from __future__ import annotations

import pytest
import torch

from erlangen.prior import made_up_images
from erlangen.prior.images import textures


def drawn(count: int, colours: int = 3, side: int = 32, seed: int = 0) -> torch.Tensor:
    return made_up_images(count, colours, side, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("colours", "side"), [(1, 8), (3, 16), (1, 29), (4, 12)])
def test_pixels_are_finite_and_between_zero_and_one(colours, side):
    images = drawn(16, colours, side)
    assert images.shape == (16, colours, side, side)
    assert bool(images.isfinite().all())
    assert 0 <= float(images.min()) < 0.2
    assert 0.8 < float(images.max()) <= 1


def test_a_seed_decides_everything_and_nothing_else_does():
    torch.manual_seed(1)
    first = drawn(8)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(8))
    assert not torch.equal(first, drawn(8, seed=1))
    state = torch.random.get_rng_state()
    drawn(4)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is somebody else's"


def test_no_two_images_are_alike():
    flat = drawn(64, side=16).flatten(1)
    apart = torch.cdist(flat, flat).fill_diagonal_(torch.inf)
    assert float(apart.min()) > 0.1


def test_energy_falls_with_frequency_about_as_in_photographs():
    """The amplitude spectrum of photographs falls as 1/f^α with α near 1 (Field, 1987); white noise has α = 0."""
    images = drawn(256, 1, 64)[:, 0]
    window = torch.hann_window(64)
    power = torch.fft.fft2((images - images.mean((1, 2), keepdim=True)) * window * window[:, None]).abs().square().mean(0)
    f = torch.fft.fftfreq(64)
    radius = torch.hypot(f[:, None], f[None])
    rings = torch.tensor([float(power[(radius >= a) & (radius < 1.5 * a)].mean()) for a in (0.04, 0.08, 0.16, 0.3)])
    slope = (rings.log().diff() / torch.log(torch.tensor([2.0, 2.0, 1.875]))).mean() / 2
    assert -1.6 < float(slope) < -0.6


def test_textures_have_no_colour_of_their_own_and_bounded_size():
    found = textures(64, 3, 32, torch.Generator().manual_seed(0))
    assert float(found.mean().abs()) < 0.05
    assert 0.1 < float(found.std()) < 1
    assert float(found.abs().max()) < 4
