"""What a module answers after training comes from its weights, not from records that it kept in a plain attribute."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence
from erlangen.gradients.memory import attributes_untouched, untouched


class Centred(nn.Module):
    """Keeps a running mean of what it is trained on, and takes it off in evaluation. It is no buffer: no state_dict() shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        if len(x):
            self.keep(x.detach().mean(0))
        return x

    def keep(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


class InPlace(Centred):
    def keep(self, mean: Tensor) -> None:
        self.mean.lerp_(mean, 0.1)


class Nearest(Centred):
    """The last few records themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque([torch.zeros(5)], maxlen=3)

    def keep(self, mean: Tensor) -> None:
        self.last.append(mean)
        self.mean = torch.stack(list(self.last)).mean(0)


class Counts(Centred):
    """How many records there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x) * self.training
        return x / (1 + self.count)


@pytest.mark.parametrize("kind", [Centred, InPlace, Nearest])
def test_a_memory_that_only_evaluation_reads_is_refused(kind):
    with pytest.raises(MixesSamples, match="what the module answers in evaluation depends on the records"):
        check_independence(nn.Sequential(kind(), nn.Linear(5, 2)), (torch.randn(3, 5),))


def test_a_count_of_records_is_refused():
    with pytest.raises(MixesSamples):
        check_independence(nn.Sequential(Counts(), nn.Linear(5, 2)), (torch.randn(3, 5),))


class Shows(nn.Module):
    """Keeps its last activations for pictures, counts its batches, and cools down with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.batches, self.shown, self.all = nn.Linear(5, 2), 0, torch.zeros(0), [0]
        self.handle = self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.inner(x)
        if self.training:
            self.all.append(len(self.all))
            return self.shown
        return self.shown / (1 + len(self.all))


def test_activations_that_nobody_reads_and_counts_of_batches_are_accepted_and_set_back():
    module = Shows()
    kept, shown = module.all, module.shown
    with untouched(module), attributes_untouched(module):
        module(torch.randn(3, 5))
    assert module.all is kept
    assert kept == [0]
    assert module.shown is shown
    check_independence(module, (torch.randn(3, 5),))
    module.handle.remove()
    assert not module._forward_hooks, "handles still point to the hooks"


def test_what_a_record_moves_in_the_answers():
    """At ε = 0.4 one record moved an answer from 1.4 to 9.1."""

    def answer(value: float) -> Tensor:
        torch.manual_seed(0)
        model, x = nn.Sequential(Centred(), nn.Linear(5, 2)), torch.randn(40, 5)
        x[0] = value
        engine = erlangen.PrivacyEngine(seed=0)
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=5.0, max_grad_norm=1.0, check=False,
            data_loader=DataLoader(TensorDataset(x, torch.zeros(40, dtype=torch.long)), batch_size=20),
        )  # fmt: skip
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        assert engine.get_epsilon(1e-5) < 1
        return model.eval()(torch.ones(1, 5)).detach()

    assert float((answer(1e3) - answer(0.0)).abs().max()) > 5
