"""Records that end in zeros: a module that reads their lengths may sort by them, or let the longest speak for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.gradients.independence import MixesSamples, check_independence


class Sorted(nn.Module):
    """The longest record first, as packing asked for; answers are in the order of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = present(x).sum(1).argsort(descending=True, stable=True)
        return self.head(self.embed(x[order]).sum(1)[order.argsort()])


class Cut(nn.Module):
    """Cut at the longest record of a batch; then the mean over tokens, those of padding left out or not."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embed, self.head, self.masked = nn.Linear(4, 4), nn.Linear(4, 3), masked

    def forward(self, x: Tensor) -> Tensor:
        longest = int(present(x).sum(1).max())
        x, here = x[:, :longest], present(x)[:, :longest, None]
        tokens = self.embed(x)
        return self.head((tokens * here).sum(1) / here.sum(1).clamp(min=1) if self.masked else tokens.mean(1))


class Last(nn.Module):
    """The state at a record's own last token."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][torch.arange(len(x)), present(x).sum(1).clamp(min=1) - 1])


def present(x: Tensor) -> Tensor:
    return x.abs().sum(2) > 0


@pytest.mark.parametrize("seed", range(3))
def test_sorting_by_length_is_refused(seed):
    """Made-up rows were as long as can be, all of them: one record of 200 moved the sum by nine bounds."""
    torch.manual_seed(seed)
    with pytest.raises(MixesSamples, match="another order"):
        check_independence(Sorted(), (torch.randn(3, 9, 4),))


def test_sorting_by_length_is_refused_by_make_private():
    x, y, model = torch.randn(40, 9, 4), torch.randint(0, 3, (40,)), Sorted()
    for k in range(40):
        x[k, 1 + 7 * k % 9 :] = 0
    with pytest.raises(MixesSamples, match="another order"):
        erlangen.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, max_grad_norm=1.0,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_over_as_many_tokens_as_the_longest_record_has_is_refused(seed):
    torch.manual_seed(seed)
    with pytest.raises(MixesSamples, match=r"Cut \(the module itself\) mixes samples"):
        check_independence(Cut(masked=False), (torch.randn(3, 9, 4),))


@pytest.mark.parametrize("make", [lambda: Cut(masked=True), Last, lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2))])
@pytest.mark.parametrize("seed", range(3))
def test_modules_that_mind_each_record_s_own_length_are_accepted(make, seed):
    torch.manual_seed(seed)
    check_independence(make(), (torch.randn(3, 9, 4),))


class Tokens(nn.Module):
    """Token numbers, zero where there is none, for a module that reads features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(20, 4, padding_idx=0), inner
        with torch.no_grad():
            self.table.weight[0] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(self.table(tokens))


@pytest.mark.parametrize("inner", [Sorted, lambda: Cut(masked=False)], ids=["sorted", "cut"])
def test_records_of_one_length_do_not_hide_what_is_made_of_others(inner):
    """Token numbers are not made up: the three records that are looked at may be equally long."""
    tokens = torch.randint(1, 20, (3, 9))
    tokens[:, 6:] = 0
    with pytest.raises(MixesSamples):
        check_independence(Tokens(inner()), (tokens,))
    check_independence(Tokens(Cut(masked=True)), (tokens,))
    check_independence(Tokens(Last()), (tokens,))


class Encoder(nn.Module):
    """A transformer that skips padding; in evaluation PyTorch keeps what is left in nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encode, self.head = nn.Linear(4, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        here = present(x)
        tokens = self.encode(self.embed(x), src_key_padding_mask=~here) * here[..., None]
        return self.head(tokens.sum(1) / here.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_that_skips_padding_is_accepted():
    """It was refused with an internal error of PyTorch: nested tensors have no sizes."""
    check_independence(Encoder(), (torch.randn(3, 9, 4),))
