"""A record that is not finite counts for nothing, and nobody else counts for less because of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence


class Guarded(nn.Module):
    """Asks the whole batch whether anything is wrong with it."""

    def __init__(self, wrong=lambda x: x.isnan().any()) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.wrong(x) else x


class Dispatched(nn.Module):
    """Hands rows over by a product with a matrix of ones and zeros: nothing times nan is nan."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(len(x)) @ x


class EachByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isfinite().all(1, keepdim=True), x, 0.0)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("a value is not finite")
        return x


@pytest.mark.parametrize(
    "module", [Guarded(), Guarded(lambda x: x.isinf().any()), Guarded(lambda x: not x.isfinite().all()), Dispatched()]
)
def test_guards_over_the_whole_batch_are_refused(module):
    with pytest.raises(MixesSamples, match="other records of the batch where they are not finite"):
        check_independence(nn.Sequential(module, nn.Linear(5, 2)), (torch.randn(3, 5),))


@pytest.mark.parametrize("module", [EachByItself(), Raises(), nn.GroupNorm(1, 5)])
def test_guards_of_each_row_and_errors_are_accepted(module):
    check_independence(nn.Sequential(module, nn.Linear(5, 2)), (torch.randn(3, 5),))


def test_what_a_record_that_is_not_finite_moves():
    """It took the gradients of all 20 others away: by 20 bounds."""

    def released(count: int) -> Tensor:
        x = torch.ones(21, 5)
        x[20] = torch.nan
        model = nn.Sequential(Guarded(), nn.Linear(5, 2, bias=False))
        nn.init.zeros_(model[1].weight)
        _, optimizer, loader = erlangen.PrivacyEngine(seed=0).make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=0.0, max_grad_norm=1.0, check=False,
            data_loader=DataLoader(TensorDataset(x[:count], torch.zeros(count, dtype=torch.long)), batch_size=count),
        )  # fmt: skip
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return model[1].weight.detach() * count

    assert float((released(21) - released(20)).norm()) > 19
