"""Complex parameters: noise drawn as complex numbers would be too small by √2 in every real coordinate."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.mechanisms import GaussianMechanism


class Spectral(nn.Module):
    def __init__(self, real: bool) -> None:
        super().__init__()
        start = torch.randn(4, 3, dtype=torch.cfloat)
        self.weight = nn.Parameter(torch.view_as_real(start).clone() if real else start)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x.to(torch.cfloat) @ weight).abs()


def private(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    data = DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,))), batch_size=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
    )


def test_a_complex_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' is complex"):
        private(nn.Sequential(Spectral(real=False)))
    with pytest.raises(ValueError, match="'w' is complex"):
        GaussianMechanism(1.0, 1.0).release({"w": torch.zeros(2, 3, dtype=torch.cfloat)})


def test_its_real_view_trains() -> None:
    model, optimizer, data = private(nn.Sequential(Spectral(real=True)))
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert bool(torch.isfinite(model[0].weight).all())
