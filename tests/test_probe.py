"""The probe calls a module as the user's loop would: by its first input, by several, by name, and time-major inside."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from erlangen import PrivacyEngine
from erlangen.gradients.independence import MixesSamples, check_independence
from erlangen.probe import ByName, fitting, forms

X, T, Y = torch.randn(24, 6), torch.randint(0, 9, (24,)), torch.randint(0, 2, (24,))


class TwoInputs(nn.Module):
    """``spoilt`` divides by a statistic of the batch."""

    def __init__(self, spoilt=False):
        super().__init__()
        self.features, self.time, self.head, self.spoilt = nn.Linear(6, 4), nn.Embedding(9, 4), nn.Linear(4, 2), spoilt

    def forward(self, x, t):
        hidden = torch.tanh(self.features(x) + self.time(t))
        return self.head(hidden / hidden.std() if self.spoilt else hidden)


class ByKeyword(TwoInputs):
    """As language models do: a mapping in, a loss and logits out."""

    def forward(self, inputs, labels=None, times=None):
        logits = super().forward(inputs, times)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Records(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {"number": i, "labels": Y[i], "times": T[i], "inputs": X[i]}


def private(module, data, **options):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = DataLoader(data, batch_size=8)
    return PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **options
    )


CASES = {"positions": (TwoInputs, TensorDataset(X, T, Y)), "names": (ByKeyword, Records())}


@pytest.mark.parametrize("case", CASES)
def test_modules_of_several_inputs_are_checked_without_a_word(case):
    kind, data = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(kind(), data)


@pytest.mark.parametrize("case", CASES)
def test_modules_of_several_inputs_that_mix_are_refused(case):
    kind, data = CASES[case]
    with pytest.raises(MixesSamples):
        private(kind(spoilt=True), data)


def test_a_mapping_is_called_with_the_names_that_the_module_takes():
    (form,) = forms(ByKeyword(), DataLoader(Records(), batch_size=4))
    assert isinstance(form.call, ByName)
    assert form.call.names == ("labels", "times", "inputs")
    assert not torch.equal(form.inputs[2], X[:3])  # made up
    assert fitting([form])[1]["logits"].shape == (3, 2)


def test_the_memory_of_several_inputs_can_be_measured():
    _, _, loader = private(TwoInputs(), TensorDataset(X, T, Y), max_physical_batch="auto")
    assert len(list(loader)) == 3


def test_what_cannot_be_called_is_said():
    with pytest.warns(UserWarning, match=r"could not be called .*missing 1 required"):
        private(TwoInputs(), TensorDataset(X, Y))
    with pytest.warns(UserWarning, match="neither tensors"):
        private(nn.Linear(6, 2), [{"inputs": x, "meta": "text"} for x in X])


class TimeMajor(nn.Module):
    """Turns the batch to the second place inside; ``length`` tokens."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.inner(x.transpose(0, 1)))).mean(0))


@pytest.mark.parametrize("length", [3, 4, 5, 7])
def test_time_major_layers_pass_if_they_are_announced_and_only_then(length):
    """As many tokens as the probe has rows must not seem to be records."""
    data = TensorDataset(torch.randn(24, length, 6), Y)
    private(TimeMajor(), data, batch_first=False)
    with pytest.raises(MixesSamples, match=f"sees {length} rows"):
        private(TimeMajor(), data)
    check_independence(TimeMajor(), (torch.randn(3, length, 6),), batch_first=False)


def test_announced_time_major_layers_give_the_gradients_of_one_record_at_a_time():
    torch.manual_seed(0)
    module, x = TimeMajor(), torch.randn(6, 5, 6)
    y, want = Y[:6], {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for i in range(6):
        grads = torch.autograd.grad(F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]), list(module.parameters()))
        scale = min(1.0, 0.3 / float(torch.sqrt(sum(g.square().sum() for g in grads))))
        for (name, _), g in zip(module.named_parameters(), grads, strict=True):
            want[name] += scale * g / 6
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), 0.0), data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=0.3, batch_first=False,
    )  # fmt: skip
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6)
