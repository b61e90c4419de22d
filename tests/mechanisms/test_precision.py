"""Norms, sums and what is noised keep their precision, whatever the user has asked of products elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms import Context, GaussianMechanism, StreamNoise, make_mechanism
from erlangen.mechanisms.clipping import Flat
from erlangen.mechanisms.geometry import Geometry
from tests.engines import private

FORMS = [("iso", {}), ("gredp", {}), ("spectral", {}), ("geodp", {"form": "direction"}), ("geodp", {"form": "angles", "beta": 1.0})]
BFLOAT16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def build(name: str, options: dict, shape: tuple[int, ...]):
    mechanism = make_mechanism(name, Context(0.0, Flat(1.0), StreamNoise(0), nn.Identity(), 1.0, options))
    mechanism.bind({"w": torch.zeros(shape)})
    return mechanism


@pytest.mark.parametrize(("name", "options"), FORMS[:3])
def test_a_sum_is_not_rounded_before_its_noise(name, options):
    """Entries of about 16 have steps of 1/8 in bfloat16: one record would move all 576 of them by a step, and the sum by 3."""
    each = torch.ones(300, 8, 8, 3, 3)
    for others in range(280, 300):
        ends = []
        for count in (others, others + 1):
            mechanism = build(name, options, (8, 8, 3, 3))
            mechanism.accumulate(PerSampleGradients.from_dense({"w": each[:count]}))
            with torch.autocast(**BFLOAT16):
                ends.append(mechanism.finish(1.0)["w"].double())
        assert float((ends[1] - ends[0]).norm()) <= 1.0 + 1e-4


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_a_release_inside_autocast_is_that_outside(name, options):
    gradients = {"w": 100 * torch.randn(5, 4, 4, 3, 3, generator=torch.Generator().manual_seed(0))}
    outside = build(name, options, (4, 4, 3, 3)).release(gradients)["w"]
    with torch.autocast(**BFLOAT16):
        inside = build(name, options, (4, 4, 3, 3)).release(gradients)["w"]
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-7)


class Turned(Geometry):
    """Coordinates of a user: a rotation, as a matrix product."""

    def matrix(self, like):
        return torch.linalg.qr(torch.randn(like.shape[-1], like.shape[-1], generator=torch.Generator().manual_seed(0)))[0].to(like)

    def forward(self, name, g):
        return g @ self.matrix(g)

    def inverse(self, name, c):
        return c @ self.matrix(c).T


@pytest.mark.parametrize("mechanism", ["iso", "gredp", "spectral", "geodp", "rotated"])
def test_an_engines_step_inside_autocast_is_that_outside(mechanism):
    def gradient(inside: bool) -> torch.Tensor:
        chosen = GaussianMechanism(0.0, 1.0, Turned(), StreamNoise(0), "rotated") if mechanism == "rotated" else mechanism
        _, model, optimizer, loader = private(noise_multiplier=0.0, mechanism=chosen)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.autocast(**BFLOAT16, enabled=inside):
                optimizer.step()
            break
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="before PyTorch 2.9")
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_precisions_that_were_set_backend_by_backend_stop_nothing(name, options):
    """PyTorch then refuses to say what the precision of products is."""
    gradients = {"w": torch.randn(3, 4, 4, 3, 3)}
    want = build(name, options, (4, 4, 3, 3)).release(gradients)["w"]
    knob = torch.backends.mkldnn.matmul
    before = knob.fp32_precision
    knob.fp32_precision = "bf16"
    try:
        torch.testing.assert_close(build(name, options, (4, 4, 3, 3)).release(gradients)["w"], want, rtol=1e-6, atol=1e-7)
    finally:
        knob.fp32_precision = before
