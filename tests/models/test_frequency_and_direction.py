"""The networks of the GReDP and GeoDP papers: layers, parameters, shapes, and no layer that mixes samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erlangen.gradients.independence import known_problems
from erlangen.models import geodp, gredp

COUNTS = {
    # name: (builder, input, k×k convolutions, linear layers, parameters)
    "lenet5": (gredp.lenet5, (1, 28, 28), 2, 3, 61_706),
    "resnet20": (gredp.resnet20, (3, 32, 32), 19, 1, 269_722),
    "model3": (gredp.model3, (3, 32, 32), 6, 2, 534_098),
    "alexnet": (gredp.alexnet, (3, 32, 32), 5, 3, 2_293_438),
    "resnet18": (gredp.resnet18, (3, 32, 32), 17, 1, 11_179_850),
    "logistic": (geodp.logistic_regression, (1, 28, 28), 0, 1, 7_850),
    "cnn": (geodp.cnn, (1, 28, 28), 2, 2, 21_840),
    "resnet3": (geodp.resnet3, (3, 32, 32), 7, 1, 77_818),
}


def layers(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, kind)]


@pytest.mark.parametrize("name", COUNTS)
def test_layers_and_parameters(name):
    builder, shape, convolutions, linears, parameters = COUNTS[name]
    model = builder(shape, 10)
    assert sum(max(c.kernel_size) > 1 for c in layers(model, nn.Conv2d)) == convolutions
    assert len(layers(model, nn.Linear)) == linears
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not known_problems(model)
    with torch.no_grad():
        out = model(torch.randn(2, *shape))
        assert out.shape == (2, 10)


@pytest.mark.parametrize("name", COUNTS)
def test_other_sizes_and_classes(name):
    builder = COUNTS[name][0]
    with torch.no_grad():
        assert builder((2, 32, 32), 7)(torch.randn(1, 2, 32, 32)).shape == (1, 7)


def test_resnet20_is_seven_plus_six_plus_six():
    widths = [c.out_channels for c in layers(gredp.resnet20(), nn.Conv2d)]
    assert [widths.count(w) for w in (16, 32, 64)] == [7, 6, 6]


def test_lenet_as_its_table_says_literally():
    assert [c.out_channels for c in layers(gredp.lenet5(channels=(6, 6)), nn.Conv2d)] == [6, 6]


@pytest.mark.parametrize("count", [1, 2])
def test_fine_tuning_the_last_convolutions(count):
    model = gredp.fine_tune(gredp.resnet18(), count)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == count + 2
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count * 512 * 512 * 9 + 5130
    assert not any(p.requires_grad for p in gredp.fine_tune(gredp.lenet5(), 0, head=False).parameters())
    with pytest.raises(ValueError, match="has 2 convolutions"):
        gredp.fine_tune(gredp.lenet5(), 3)
