"""Plain networks: known sizes, standardised filters, no mixing of samples."""

import pytest
import torch

from erlangen.models.resnet import resnet9, wide_resnet, wrn_16_4, wrn_40_4
from erlangen.models.standardised import StandardisedConv2d, standardise


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes() -> None:
    assert parameters(resnet9()) / 1e6 == pytest.approx(2.4, rel=0.03)
    assert parameters(wrn_16_4()) / 1e6 == pytest.approx(2.75, rel=0.01)
    assert parameters(wrn_40_4()) / 1e6 == pytest.approx(8.9, rel=0.01)
    with pytest.raises(ValueError, match="6n\\+4"):
        wide_resnet(17, 4)
    with pytest.raises(ValueError, match="activation is 'gelu'; choose mish or relu"):
        resnet9(activation="gelu")


@pytest.mark.parametrize(
    "build",
    [
        lambda: resnet9(layout=(8, 16, 32)),
        lambda: resnet9(layout=(8, 16, 32), scale_norm=True, standardise=True),
        lambda: wide_resnet(10, 1),
        lambda: wide_resnet(10, 1, standardise=False),
    ],
)
def test_samples_do_not_mix(build) -> None:
    torch.manual_seed(0)
    model = build()
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        together, alone = model(x), model(x[1:2])
    assert together.shape == (3, 10)
    assert torch.allclose(together[1:2], alone, atol=1e-4)


def test_standardised_filters() -> None:
    torch.manual_seed(0)
    model = resnet9(layout=(8, 16, 32), standardise=True)
    convolutions = [m for m in model.modules() if isinstance(m, StandardisedConv2d)]
    assert len(convolutions) == 8
    for conv in convolutions:
        filters = conv.filters().flatten(1)
        assert filters.mean(1).abs().max() < 1e-6
        assert torch.allclose(filters.square().sum(1), torch.ones(len(filters)), atol=1e-4)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: standardise(v)[0], (weight,), fast_mode=True)
    assert torch.allclose(standardise(5 * weight + 1)[0], standardise(weight)[0], atol=1e-6)
