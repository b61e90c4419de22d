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


# -- rounding that the dtype of a cotangent does not show ---------------------------------------------------------------


class Adapted(nn.Module):
    """Trainable float32 adapters around frozen 16-bit layers, as adapters of language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 10).bfloat16().requires_grad_(False)

    def forward(self, x):
        x = x.bfloat16()
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x.float())).bfloat16())).float()


class Headed(nn.Module):
    """A frozen 16-bit trunk and a float32 head: nothing comes back through the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.trunk(x.bfloat16()).float())


class Normed(nn.Module):
    """Only a norm trains, between layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Whole(nn.Module):
    """Parameters of its own: torch.func differentiates all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(torch.tanh(x * self.scale))


def taught(module: nn.Module, reduction: str = "mean", rows: int = 7, cast=lambda out: out, autocast: bool = False):
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    data = TensorDataset(torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    made = erlangen.PrivacyEngine(seed=0)
    made.make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=BOUND,
        loss_reduction=reduction, check=False,
    )  # fmt: skip
    made.training.announce(RowMap.regular(rows))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(torch.randn(rows, 8))
    F.cross_entropy(cast(out), torch.arange(rows) % 10, reduction=reduction).backward()
    optimizer.step()
    return made


CASES = {
    "adapters": (Adapted, {}),
    "a norm under autocast": (Normed, {"autocast": True}),
    "a whole module under autocast": (Whole, {"autocast": True}),
    "a loss that casts behind the last layer": (lambda: nn.Linear(8, 10), {"cast": lambda out: out.bfloat16().float()}),
    "a loss that casts": (Normed, {"cast": lambda out: out.bfloat16().float()}),
    "a loss that casts to half": (Normed, {"cast": lambda out: out.half().float()}),
}


@pytest.mark.parametrize("case", CASES)
def test_means_that_are_rounded_on_their_way_are_refused_and_sums_are_not(case):
    torch.manual_seed(0)
    kind, options = CASES[case]
    with pytest.raises(RuntimeError, match=r"gradients are .*loss_reduction='sum'"):
        taught(kind(), **options)
    taught(kind(), "sum", **options)


def test_what_is_rounded_before_anything_trains_does_not_count():
    torch.manual_seed(0)
    taught(Headed())
    taught(Normed())
    taught(Whole())


@pytest.mark.parametrize("rows", [6, 7, 8])
def test_losses_with_few_different_cotangents_are_not_taken_for_rounded_ones(rows):
    """±1/n and multiples of it have few bits where n is a power of two only."""
    torch.manual_seed(0)
    module = nn.Linear(8, 10)
    made = engine_of(module)
    made.announce(RowMap.regular(rows))
    (module(torch.randn(rows, 8)) - 0.5).abs().sum(1).mean().backward()
    made.optimizer.step()


def engine_of(module: nn.Module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    data = TensorDataset(torch.zeros(16, 8), torch.zeros(16, dtype=torch.long))
    made = erlangen.PrivacyEngine(seed=0)
    made.make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=BOUND,
        check=False,
    )  # fmt: skip
    return made.training


@pytest.fixture
def medium():
    """float32 products in bfloat16 where the processor has it, as some trainers advise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10)), Whole])
def test_products_of_fewer_bits_that_somebody_asked_for_are_refused(medium, kind):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="set_float32_matmul_precision"):
        taught(kind())
    taught(kind(), "sum")


def test_frozen_layers_behind_the_last_trained_one_must_not_round_their_products(medium):
    with pytest.raises(RuntimeError, match="rounded in products"):
        taught(Normed())
    taught(Normed(), "sum")


def test_units_have_private_sizes_in_shuffled_batches_too():
    data = TensorDataset(torch.zeros(16, 8), torch.zeros(16, dtype=torch.long))
    made, module = erlangen.PrivacyEngine(seed=0), nn.Linear(8, 10)
    options = {"noise_multiplier": 1.0, "max_grad_norm": BOUND, "poisson_sampling": False, "check": False}
    made.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0), data_loader=DataLoader(data, batch_size=4),
        unit=[k // 2 for k in range(16)], **options,
    )  # fmt: skip
    assert made.training.tape.private_sizes


def test_a_record_that_is_not_finite_stops_nobody():
    """Where all others are answered with certainty, what comes back is zero but for one record's nan, whose last bits are zero."""
    training = engine("mean")
    x = 1e6 * torch.ones(5, 8)
    certain = training.module(x).argmax(1)
    x[2] = torch.nan
    training.announce(RowMap.regular(5), True, False)
    F.cross_entropy(training.module(x), certain).backward()
    training.optimizer.step()
    assert all(not bool(t.any()) for t in training.mechanism.clipped_sum().values())
