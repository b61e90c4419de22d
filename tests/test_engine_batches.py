"""What puts a record into the rows of others before the network sees them: padding, collate functions, fetching a batch."""

from __future__ import annotations

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import erlangen
from erlangen.gradients.independence import MixesSamples
from tests.test_engine_records import private, records


class Sequences(Dataset):
    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.items = [torch.randn(k, 4, generator=generator) for k in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        return self.items[k], k % 2


def padded(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


class Reads(nn.Module):
    """The last state of an LSTM as a batch pads it, or the sum of all tokens."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.lstm, self.head = last, nn.LSTM(4, 6, batch_first=True), nn.Linear(6 if last else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1] if self.last else x.sum(1))


def test_the_length_of_a_record_does_not_reach_the_others():
    """One long sequence pads all others of its batch, and their last state is another one."""
    lengths = [3] * 15 + [30]
    with pytest.raises(MixesSamples, match="padded"):
        private(Sequences(lengths), Reads(last=True), collate_fn=padded)
    private(Sequences(lengths), Reads(last=True), collate_fn=padded, check=False)
    private(Sequences([3] * 16), Reads(last=True), collate_fn=padded)
    private(Sequences(lengths), Reads(last=False), collate_fn=padded)


# -- collate functions ----------------------------------------------------------------------------------------------------


def stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def mixup(rows: list[tuple[Tensor, Tensor]], share: float | None = 0.5, chance: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = stacked(rows)
    if torch.rand(()) >= chance:
        return x, y
    share = float(torch.rand(())) if share is None else share
    return share * x + (1 - share) * x[torch.randperm(len(x)) if chance < 1 else torch.arange(len(x)).roll(1)], y


def centred(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = stacked(rows)
    return x - x.mean(0), y


MIXING = {
    "mixup": mixup, "now and then": lambda rows: mixup(rows, None, 0.5), "centred": centred,
    "largest": lambda rows: (stacked(rows)[0] / stacked(rows)[0].abs().max(), stacked(rows)[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_a_collate_function_that_mixes_records_is_refused(name):
    """With mixup a record is in two rows: removing one of 12 moved the sum by 2.7 bounds, and centring by 13.9."""
    with pytest.raises(ValueError, match="collate function puts a record into the rows of others"):
        private(records(), collate_fn=MIXING[name])


def test_what_mixup_in_a_collate_function_moves():
    moved = {}
    for name in ("mixup", "centred"):
        sums = []
        for count in (12, 11):
            x = torch.ones(12, 5)
            x[11] = -100.0
            torch.manual_seed(0)
            model = nn.Linear(5, 3)
            _, optimizer, loader = private(
                TensorDataset(x[:count], torch.zeros(12, dtype=torch.long)[:count]), model, collate_fn=MIXING[name], check=False
            )
            batch, targets = next(iter(loader))
            F.cross_entropy(model(batch), targets, reduction="mean").backward()
            optimizer.step()
            sums.append(count * torch.cat([p.grad.flatten() for p in model.parameters()]))
        moved[name] = float((sums[0] - sums[1]).norm())
    assert moved["mixup"] > 2.5
    assert moved["centred"] > 13


def test_a_collate_function_that_comes_later_is_refused():
    """It was used as it is: centring moved the sum by 13.9 bounds after all."""
    _, _, loader = private(records())
    next(iter(loader))
    loader.collate_fn = centred
    with pytest.raises(RuntimeError, match="collate function is another one"):
        next(iter(loader))


class Together(Dataset):
    """Fetches a whole batch at once, as tables and tokenizers do."""

    def __init__(self, dataset: Dataset, batch=lambda rows: rows) -> None:
        self.dataset, self.batch = dataset, batch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int):
        return self.batch([self.dataset[place]])[0]

    def __getitems__(self, places: list[int]):
        return self.batch([self.dataset[k] for k in places])


def centred_rows(rows):
    mean = torch.stack([x for x, _ in rows]).mean(0)
    return [(x - mean, y) for x, y in rows]


def test_a_data_set_that_mixes_the_records_of_a_batch_is_refused():
    """Records were looked at one by one, and loaders fetch them together: one record of 11 moved the sum by 10.4 bounds."""

    def released(count: int) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(11, 5)
        x[10] = 1e4
        model = nn.Linear(5, 3)
        for p in model.parameters():
            nn.init.zeros_(p)
        dataset = Together(TensorDataset(x[:count], torch.zeros(count, dtype=torch.long)), centred_rows)
        _, optimizer, loader = private(dataset, model, check=False)
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]) * count

    assert float((released(11) - released(10)).norm()) > 10
    swapped = lambda rows: [(x, rows[-1 - k][1]) for k, (x, _) in enumerate(rows)]  # noqa: E731
    for batch in (centred_rows, swapped):
        for dataset in (Together(records(), batch), Subset(Together(records(), batch), range(9))):
            with pytest.raises(ValueError, match=r"__getitems__ puts a record into the rows of others"):
                private(dataset)


def test_data_sets_that_fetch_a_batch_at_once_are_accepted():
    noisy = lambda rows: [(x + torch.randn_like(x), y) for x, y in rows]  # noqa: E731
    at_once = lambda rows: list(zip(torch.stack([x for x, _ in rows]) + torch.randn(len(rows), 5), [y for _, y in rows]))  # noqa: E731
    for batch in (lambda rows: rows, noisy, at_once):
        private(Together(records(), batch))
        private(Subset(Together(records(), batch), range(9)))


class Columns(UserDict):
    """What tokenizers return: it has names, and is no dict."""


@pytest.mark.parametrize("form", ["rows", "tensors", "columns"])
@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_is_not_fetched(form, workers):
    """A batch in which nobody is was asked of the data set as __getitems__([]), which raised where rows are stacked."""

    def batch(rows):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))  # of no rows there are no columns
        return (x, y) if form == "tensors" else list(zip(x, y, strict=True))

    named = lambda rows: Columns(zip("xy", default_collate(rows)))  # noqa: E731
    collate = {"rows": default_collate, "tensors": lambda made: made, "columns": named}
    loading = {"num_workers": workers, "collate_fn": collate[form]}
    engine = erlangen.PrivacyEngine(seed=0)
    model, optimizer, loader = private(Together(records(), batch), engine=engine, batch=1, **loading)
    sizes = []
    for _ in range(3):
        for made in loader:
            x, y = (made["x"], made["y"]) if form == "columns" else made
            assert form != "columns" or isinstance(made, Columns)
            sizes.append(engine.training.tape.rows.owners)
            assert len(x) == max(1, sizes[-1])
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert sizes.count(0) > 5
    assert max(sizes) > 1
    assert engine.accountant.steps == len(sizes) == 36


class Flattens(nn.Module):
    """As networks are written everywhere: of no rows at all PyTorch cannot say how long each is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(x.size(0), 2, 3).view(len(x), -1))


@pytest.mark.parametrize("unit", [None, [k // 2 for k in range(12)]])
@pytest.mark.parametrize("options", [{}, {"strategy": "norms-first"}, {"mechanism": "geodp"}, {"max_physical_batch": 1}])
def test_where_nobody_is_drawn_a_row_of_nobody_stands_in(options, unit):
    """x.view(len(x), -1) raised in a batch of no rows, and a mean loss was nan. What stands in is no number, and moves nothing."""
    x, labels = records().tensors
    x[0] = torch.nan
    engine, model, nobody = erlangen.PrivacyEngine(seed=0), Flattens(), 0
    options = {"noise_multiplier": 0.0, "unit": unit, **options}
    model, optimizer, loader = private(TensorDataset(x, labels), model, engine=engine, batch=1, **options)
    for _ in range(3):
        for inputs, targets in loader:
            empty = engine.training.tape.rows.owners == 0
            before = [p.detach().clone() for p in model.parameters()]
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            assert not empty or all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            nobody += empty
    assert nobody > 1
    assert engine.accountant.steps == 3 * len(loader)


def test_padding_where_a_batch_is_fetched_is_found():
    def to_the_longest(rows):
        longest = max(len(x) for x, _ in rows)
        return [(F.pad(x, (0, 0, 0, longest - len(x))), y) for x, y in rows]

    dataset = Together(Sequences([5, 3, 9, 4] * 4), to_the_longest)
    with pytest.raises(MixesSamples, match="length to which its batch is padded"):
        private(dataset, Reads(last=True))
    private(dataset, Reads(last=False))


def test_collate_functions_that_treat_each_record_by_itself_are_accepted():
    by_row = {
        "plain": stacked, "shuffled": lambda rows: stacked([rows[k] for k in torch.randperm(len(rows))]),
        "sorted": lambda rows: stacked(sorted(rows, key=lambda row: float(row[0].sum()))),
        "noisy": lambda rows: (stacked(rows)[0] + torch.randn(len(rows), 5), stacked(rows)[1]),
        "numpy": lambda rows: (stacked(rows)[0] * float(np.random.rand()), stacked(rows)[1]),  # noqa: NPY002
    }  # fmt: skip
    for collate in by_row.values():
        private(records(), collate_fn=collate)
    with pytest.raises(ValueError, match="order of its own"):  # whose row it is would be a guess
        private(records(), collate_fn=by_row["sorted"], unit=[k // 2 for k in range(12)], batch=6)
    lefts = lambda rows: nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True, padding_side="left")  # noqa: E731
    private(Sequences([3, 4, 2, 9, 3, 5]), Reads(last=False), collate_fn=lambda rows: (lefts(rows), padded(rows)[1]))

    def careful(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if max(float(x.abs().max()) for x, _ in rows) > 100:
            raise OverflowError
        return stacked(rows)

    private(records(), collate_fn=careful)
    own = np.random.default_rng(0)
    with pytest.warns(UserWarning, match="no seed settles"):
        private(records(), collate_fn=lambda rows: (stacked(rows)[0] + own.normal(), stacked(rows)[1]))


@pytest.mark.parametrize("longest", [None, 30])
def test_rows_that_are_sorted_by_length_are_not_given_to_other_units(longest):
    """Eight records of one patient, spread over the batch, were the rows of seven others as well: seven bounds."""

    def by_length(rows):
        x, y = padded(sorted(rows, key=lambda row: -len(row[0])))
        return (x if longest is None else F.pad(x, (0, 0, 0, longest - x.shape[1]))), y

    dataset = Sequences([3] * 8 + [1 + k % 23 for k in range(56)])  # the first ones say nothing
    unit = {"patient": [k // 8 for k in range(64)]}
    with pytest.raises(ValueError, match=r"order of its own.*unit=.*enforce_sorted=False"):
        private(dataset, Reads(last=False), collate_fn=by_length, unit=unit, batch=4)
    private(dataset, Reads(last=False), collate_fn=by_length)  # where each record is for itself any order will do
    if longest is None:
        with pytest.raises(MixesSamples, match="length to which its batch is padded"):
            private(dataset, Reads(last=True), collate_fn=by_length)
    private(dataset, Reads(last=False), collate_fn=padded, unit=unit, batch=4)


# -- ignored labels -------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """Writes to what a module returned, as networks with in-place activations do."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.last = nn.PReLU(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.slopes(x)
        out *= 2
        return self.last(out.clamp_(max=30))


def test_what_a_module_without_a_rule_returned_may_be_written_to():
    """It was a view, to which PyTorch lets nobody write. Nothing is clipped: the gradients are those of the plain module."""
    torch.manual_seed(0)
    model = Written()
    plain, (x, y) = copy.deepcopy(model), records().tensors
    F.cross_entropy(plain(x), y).backward()
    model, optimizer, loader = private(records(), model, max_grad_norm=1e6)
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
