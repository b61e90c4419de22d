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
    form, *fewer = forms(ByKeyword(), DataLoader(Records(), batch_size=4))
    assert isinstance(form.call, ByName)
    assert form.call.names == ("labels", "times", "inputs")
    assert not torch.equal(form.inputs[2], X[[0, 11, 23]])  # made up
    assert torch.equal(form.inputs[1], T[[0, 11, 23]])  # integers are not
    assert [other.call.names for other in fewer] == [("times", "inputs"), ("inputs",)]
    ((_, out),) = fitting([form, *fewer])  # its forward needs all three
    assert out["logits"].shape == (3, 2)


class Optional(nn.Module):
    """``lengths`` and ``labels`` may be left out; given, they show what ``how`` makes of them."""

    def __init__(self, how="fine"):
        super().__init__()
        self.inner, self.head, self.how = nn.Linear(6, 8), nn.Linear(8, 2), how

    def forward(self, x, lengths=None, labels=None):
        lengths = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
        x = x[:, : int(lengths.max())] if len(x) else x  # no work for what is padding in all
        hidden, real = torch.tanh(self.inner(x)), torch.arange(x.shape[1]) < lengths[:, None]
        mean = hidden.mean(1) if self.how == "trims" else (hidden * real[..., None]).sum(1) / lengths[:, None]
        logits = self.head(mean)
        if labels is None:
            return logits
        weight = torch.tensor([1.0, 1000.0]) if self.how == "weighs" else None
        return {"loss": F.cross_entropy(logits, labels, weight=weight), "logits": logits}


def sequences(lengths, named):
    parts = {"x": torch.randn(24, 5, 6), "lengths": torch.tensor(lengths * 8), "labels": torch.arange(24) // 12}
    return [{k: t[i] for k, t in parts.items()} for i in range(24)] if named else TensorDataset(*parts.values())


@pytest.mark.parametrize("named", [False, True], ids=["positions", "names"])
@pytest.mark.parametrize("lengths", [[2, 5, 3], [5, 2, 5], [4, 4, 4]], ids=str)
@pytest.mark.parametrize(
    ("how", "match"), [("trims", "changes with the other records"), ("weighs", "loss of the whole batch"), ("fine", None)]
)
def test_what_may_be_left_out_is_given(how, match, lengths, named):
    """One record of 50 tokens among 200 of two moved the sum by 196 bounds, where the loop gave the lengths."""
    torch.manual_seed(0)
    if match is None:
        private(Optional(how), sequences(lengths, named))
        return
    with pytest.raises(MixesSamples, match=match + ".*if your loop calls it otherwise"):
        private(Optional(how), sequences(lengths, named))


def test_parts_of_a_batch_for_which_a_module_has_no_argument_are_left_out_in_silence():
    found = forms(nn.Linear(6, 2), DataLoader(TensorDataset(X, T, Y), batch_size=4))
    assert [len(form.inputs) for form in found] == [1]
    assert [len(form.inputs) for form in forms(Optional(), DataLoader(sequences([4, 4, 4], False)))] == [3, 2, 1]


def test_the_memory_of_several_inputs_can_be_measured():
    _, _, loader = private(TwoInputs(), TensorDataset(X, T, Y), max_physical_batch="auto")
    assert len(list(loader)) == 3


def test_what_cannot_be_called_is_said():
    with pytest.warns(UserWarning, match=r"could not be called .*missing 1 required"):
        private(TwoInputs(), TensorDataset(X, Y))
    with pytest.warns(UserWarning, match="neither tensors"):
        private(nn.Linear(6, 2), [{"inputs": x, "meta": "text"} for x in X])


class Converts(nn.Module):
    """Takes what it is given in its own precision, as networks in 16 bits often do."""

    def __init__(self, precision, spoilt=False):
        super().__init__()
        self.layers, self.precision, self.spoilt = nn.Linear(6, 2).to(precision), precision, spoilt

    def forward(self, x):
        out = self.layers(x.to(self.precision)).float()
        return out / out.std() if self.spoilt else out


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16])
def test_a_module_that_converts_what_it_is_given_is_checked_as_any_other(precision, data):
    """It was told to convert the data, which it does; and data in bfloat16 ended in an error about a ScalarType."""

    def private(module):
        optimizer, loader = torch.optim.SGD(module.parameters(), 0.1), DataLoader(TensorDataset(X.to(data), Y), batch_size=8)
        return PrivacyEngine().make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, loss_reduction="sum"
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, optimizer, loader = private(Converts(precision))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y, reduction="sum").backward()
        optimizer.step()
    with pytest.raises(MixesSamples):
        private(Converts(precision, spoilt=True))


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
