"""A mean divides by the number of rows, which one record changes: in 16 bits that rounds every other record's gradient anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.rows import RowMap

ROWS, BOUND = 1500, 1.0


def engine(reduction: str, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    data = TensorDataset(torch.zeros(16, 8), torch.zeros(16, dtype=torch.long))
    made = erlangen.PrivacyEngine(seed=0)
    made.make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=BOUND,
        loss_reduction=reduction, check=False, **options,
    )  # fmt: skip
    return made.training


def clipped_sum(training, rows: int, reduction: str) -> torch.Tensor:
    """Of ``rows`` equal records, in bfloat16: what rounding does to one it does to all."""
    x = (30.0 + torch.linspace(0, 1, 8)).repeat(rows, 1)
    training.announce(RowMap.regular(rows), True, False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(training.module(x), torch.full((rows,), 3), reduction=reduction)
    loss.backward()
    training.optimizer.step()
    return torch.cat([t.flatten() for t in training.mechanism.clipped_sum().values()]).double()


def moved(reduction: str, private_sizes: bool = True) -> float:
    """By how much one more record moves the sum, in units of the bound."""
    sums = []
    for rows in (ROWS + 1, ROWS):
        training = engine(reduction)
        training.tape.private_sizes &= private_sizes
        sums.append(clipped_sum(training, rows, reduction))
    return float((sums[0] - sums[1]).norm()) / BOUND


def test_a_sum_in_bfloat16_moves_by_one_record():
    assert moved("sum") < 1 + 1e-4


def test_a_mean_in_bfloat16_would_move_by_more_than_the_bound():
    assert moved("mean", private_sizes=False) > 3


def test_a_mean_in_bfloat16_is_refused():
    with pytest.raises(RuntimeError, match="loss_reduction='sum'"):
        moved("mean")


def test_batches_of_public_size_may_be_averaged():
    """Shuffled batches have fixed sizes, padded ones too: nobody's presence changes them."""
    clipped_sum(engine("mean", poisson_sampling=False), 8, "mean")
    training = engine("mean")
    training.announce(RowMap.regular(8, valid=torch.arange(8) < 5), True, False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(training.module(torch.ones(8, 8)), torch.zeros(8, dtype=torch.long))
    loss.backward()
    training.optimizer.step()


def test_single_precision_may_be_averaged():
    training = engine("mean")
    training.announce(RowMap.regular(8), True, False)
    F.cross_entropy(training.module(torch.ones(8, 8)), torch.zeros(8, dtype=torch.long)).backward()
    training.optimizer.step()
