"""Which layers are called, and how often, may depend on the records of a batch: then one record decides for all others."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from erlangen.gradients.independence import MixesSamples
from tests.test_engine_records import private, records


class Sometimes(nn.Module):
    """``how`` says where a layer is called because of what the whole batch looks like."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h, on = self.a(x), bool(x.mean() > 0)
        if self.how == "last":
            return self.c(h) + self.c(self.b(h)) if on else self.c(h)
        if self.how == "residual":
            return (h + self.b(h) if on else h)[:, :3]
        if self.how == "any":
            return (h + self.b(h) if bool((x.abs() > 2).any()) else h)[:, :3]
        if self.how == "exit":
            return self.c(h) if on else self.c(self.b(h))
        while float(h.detach().norm(dim=1).max()) > 1:
            h = 0.5 * torch.tanh(self.b(h))
        return self.c(h)


def test_one_record_that_decides_for_all_moved_the_sum_by_many_bounds():
    def released(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        module, optimizer, loader = private(TensorDataset(x), Sometimes("any"), check=False, loss_reduction="sum")
        for (inputs,) in loader:
            (1e3 * module(inputs)).square().sum().backward()
            optimizer.step()
        return len(x) * torch.cat([p.grad.flatten() for p in module.parameters()])

    crowd = torch.full((32, 5), 0.5)
    moved = float((released(torch.cat([crowd, torch.full((1, 5), 3.0)])) - released(crowd)).norm())
    assert moved > 10


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", ["last", "residual", "any", "exit", "while"])
def test_layers_that_are_called_because_of_others_are_refused(how, reduction):
    """Calls were compared in their order, and after one that others lacked nothing was compared any more."""
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(MixesSamples):
            private(records(), Sometimes(how), loss_reduction=reduction)


class Halting(nn.Module):
    """Goes on as long as anybody does; who has halted stays as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, going = self.a(x), torch.ones(len(x), 1, dtype=torch.bool)
        for _ in range(6):
            if not bool(going.any()):
                break
            h = torch.where(going, torch.tanh(self.b(h)), h)
            going = going & (h.norm(dim=1, keepdim=True) > 0.6)
        return self.c(h)


class EarlyExit(nn.Module):
    """Whoever is sure leaves early; the rest of the network is left out where all are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.early, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        early = self.early(h)
        sure = early.softmax(1).amax(1, keepdim=True) > 0.45
        return early if bool(sure.all()) else torch.where(sure, early, self.c(torch.relu(self.b(h))))


class Dropped(nn.Module):
    """Leaves layers out by chance, for all alike, as transformers do it: with numbers of Python or of numpy."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.head, self.draw = nn.ModuleList(nn.Linear(5, 5) for _ in range(5)), nn.Linear(5, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.draw() > 0.3:
                x = x + torch.relu(layer(x))
        return self.head(x)


def test_more_rounds_for_one_record_more_are_no_divisor():
    """In a larger batch somebody may go on for longer: nothing of those rounds comes back to the others."""
    for seed in range(40):
        torch.manual_seed(seed)
        for module in (Halting(), EarlyExit()):
            private(records(), module, loss_reduction="sum")


class Longer(nn.Module):
    """Goes on for as many rounds as there are records, and all do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.stack([self.c(h) for _ in range(len(x))]).sum(0)


def test_rounds_that_are_counted_by_records_are_refused():
    with pytest.raises(MixesSamples):
        private(records(), Longer(), loss_reduction="sum")


class Spares(nn.Module):
    """As many rounds as there are records, of which nothing shows but on the way back; some records have no part in them."""

    def __init__(self, spared: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.spared = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3), spared

    def forward(self, x: Tensor) -> Tensor:
        h, of_others = self.a(x), ~self.spared(x)[:, None]
        for _ in range(len(x)):
            y = self.b(h) * of_others
            h = h + (y - y.detach())
        return self.c(h)


SPARED = {
    "the first": lambda x: torch.arange(len(x)) == 0, "the ends": lambda x: torch.arange(len(x)) % (len(x) - 1) == 0,
    "half of them": lambda x: x[:, 0] > 0, "small ones": lambda x: x[:, 0] < 5,
}  # fmt: skip


def test_rounds_that_spare_a_record_moved_the_sum_by_many_bounds():
    def released(count: int) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(33, 5, generator=torch.Generator().manual_seed(1))[:count]
        module = Spares(SPARED["the first"])
        with torch.no_grad():
            module.b.weight.copy_(-2 * torch.eye(8))  # every round turns what comes back around
        module, optimizer, loader = private(TensorDataset(x), module, check=False, loss_reduction="sum")
        for (inputs,) in loader:
            (1e3 * module(inputs)).sum().backward()
            optimizer.step()
        return count * torch.cat([p.grad.flatten() for p in module.parameters()])

    assert float((released(33) - released(32)).norm()) > 15


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("spared", SPARED.values(), ids=SPARED)
def test_rounds_that_are_counted_by_records_are_refused_whomever_they_spare(spared, reduction):
    """The first record alone was compared, and rounds from which nothing came back to it were left out."""
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(MixesSamples, match="how many records the batch has"):
            private(records(), Spares(spared), loss_reduction=reduction)


class OneByOne(nn.Module):
    """A layer is called for every record by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.relu(self.a(x)), x.new_zeros(len(x), 3)
        for k in range(len(x)):
            out = torch.where((torch.arange(len(x)) == k)[:, None], self.c(h), out)
        return out


OTHERS_ALONE = {
    "one by one": OneByOne(),
    "halting": Halting(), "early exit": EarlyExit(), "python": Dropped(lambda: random.random()),
    "numpy": Dropped(lambda: np.random.rand()),  # noqa: NPY002
}  # fmt: skip


@pytest.mark.parametrize("module", OTHERS_ALONE.values(), ids=OTHERS_ALONE)
def test_layers_that_are_called_for_others_alone_or_by_chance_are_accepted(module):
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for seed in range(3):
        torch.manual_seed(seed)
        private(records(), copy.deepcopy(module), loss_reduction="sum")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
