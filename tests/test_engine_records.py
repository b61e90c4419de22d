"""What a loader, a collate function, a loss or a shared mechanism can do to make one record count for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import erlangen
from erlangen import lipschitz
from erlangen.data import from_torch
from erlangen.gradients.independence import MixesSamples
from erlangen.gradients.losses import check_loss
from erlangen.lipschitz.backward_clip import AdaptiveBackwardClip
from erlangen.mechanisms import GaussianMechanism, Mechanism
from erlangen.mechanisms.geodp import Angles

LOSS = lipschitz.CrossEntropy(4.0)


def records(count: int = 12) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(10 * torch.randn(count, 5), torch.arange(count) % 3)


def private(dataset: Dataset, module: nn.Module | None = None, engine=None, **options):
    module = nn.Linear(5, 3) if module is None else module
    loading = {k: options.pop(k) for k in ("sampler", "collate_fn") if k in options}
    batch = options.pop("batch", len(dataset))
    if not isinstance(options.get("mechanism", ""), Mechanism):
        options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options
    return (engine or erlangen.PrivacyEngine(seed=0)).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), 1.0),
        data_loader=DataLoader(dataset, batch_size=batch, **loading), **options,
    )  # fmt: skip


# -- the same record several times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        lambda d: Subset(d, [0, 1, 2, 0, 0]),
        lambda d: Subset(d, [11, 3, -1]),
        lambda d: Subset(Subset(d, [4, 5, 6]), [0, 1, 0]),
        lambda d: ConcatDataset([d, d]),
        lambda d: ConcatDataset([Subset(d, [0, 1]), Subset(d, [1, 2])]),
    ],
    ids=["index", "negative", "nested", "joined", "overlapping"],
)
def test_a_record_that_is_there_several_times_is_refused(dataset):
    """Oversampling by repeated indices: eleven copies moved the sum by eleven bounds."""
    repeated = dataset(records())
    with pytest.raises(ValueError, match=r"stands in the data set [23] times"):
        private(repeated)
    private(repeated, unit=[7] * len(repeated), batch=1)
    with pytest.raises(ValueError, match="one label"):
        private(repeated, unit=list(range(len(repeated))))


def test_records_that_are_there_once_are_accepted():
    whole = records()
    for dataset in (Subset(whole, np.array([3, 1, 2])), ConcatDataset([records(), records()]), Subset(whole, torch.arange(5))):
        private(dataset)
    halves = torch.utils.data.random_split(whole, [6, 6])
    private(ConcatDataset(halves))


def test_data_that_is_read_into_memory_is_looked_at_too():
    images = TensorDataset(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="2 times"):
        from_torch(Subset(images, [0, 1, 2, 0]))
    assert len(from_torch(Subset(images, [0, 1, 2, 0]), unit=[5, 1, 2, 5])) == 4


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(4)), WeightedRandomSampler(torch.ones(12), 12)])
def test_a_sampler_that_chooses_records_is_not_passed_over(sampler):
    """Whoever was left out by it would have been trained on."""
    with pytest.raises(ValueError, match="Subset"):
        private(records(), sampler=sampler)


def indices_of(dataset: Dataset, rows: list[int]) -> None:
    dataset.indices = rows


def appended(dataset: Dataset, rows: list[int]) -> None:
    dataset.datasets.append(dataset.datasets[0])
    dataset.cumulative_sizes = [12, 24]


@pytest.mark.parametrize(
    ("make", "change"),
    [(lambda d: Subset(d, range(12)), indices_of), (lambda d: ConcatDataset([d]), appended)], ids=["indices", "joined"],
)  # fmt: skip
def test_a_data_set_whose_records_change_is_refused_before_the_next_draw(make, change):
    """A curriculum that repeats hard records after the check: twelve copies of one moved the sum by twelve bounds."""
    dataset, model = make(records()), nn.Linear(5, 3)
    _, optimizer, loader = private(dataset, model)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    change(dataset, [0] * 12)
    with pytest.raises(RuntimeError, match="other records than when it was made private"):
        next(iter(loader))


# -- neighbours' length ---------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="rows of others"):  # whose row it is would be a guess
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


# -- ignored labels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ignored", "shape"), [(255, (3, 4, 4)), (-100, (3, 4, 4)), (2, (3,))])
def test_a_mean_over_labels_that_are_not_ignored_is_refused_before_one_is_met(ignored, shape):
    """One annotated image among images with a pixel each moved the sum by 36 bounds."""
    torch.manual_seed(0)
    outputs, targets = torch.randn(shape[0], 3, *shape[1:]), torch.randint(0, 2, shape)
    with pytest.raises(MixesSamples, match="ignored"):
        check_loss(nn.CrossEntropyLoss(ignore_index=ignored), outputs, targets, "mean")
    check_loss(nn.CrossEntropyLoss(ignore_index=ignored, reduction="sum"), outputs, targets, "sum")
    check_loss(nn.CrossEntropyLoss(), outputs.flatten(2).mean(-1) if len(shape) > 1 else outputs, targets.flatten()[:3], "mean")


# -- one mechanism for two ------------------------------------------------------------------------------------------------


def test_trainings_that_share_a_mechanism_do_not_share_a_sum():
    """A part of the first one's batch, and the whole batch of the second: a record in both counted twice behind one noise."""
    shared, dataset, made = GaussianMechanism(0.0, 1.0), records(), []
    for limit in (4, None):
        model = nn.Linear(5, 3)
        engine = erlangen.PrivacyEngine(seed=0)
        _, optimizer, loader = private(dataset, model, engine, mechanism=shared, max_physical_batch=limit)
        made.append((model, optimizer, iter(loader)))
    model, optimizer, batches = made[0]
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="serves another training"):
        optimizer.step()
    model, optimizer, batches = made[1]
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert sum(float(p.grad.norm()) ** 2 for p in model.parameters()) <= 1


# -- batches that broke off -----------------------------------------------------------------------------------------------


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(5, 3), nn.Linear(5, 3), True

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x) if self.both else self.left(x)


def test_a_batch_that_broke_off_is_not_in_the_next_release():
    """Angles refuse a batch that one layer did not see, after its magnitudes were added: whoever went on with the next batch
    released both behind the noise of one."""
    model, mechanism = Halves(), Angles(0.0, 1.0)
    _, optimizer, loader = private(records(), model, mechanism=mechanism)
    for both in (False, False, True):
        model.both = both
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
        if not both:
            with pytest.raises(ValueError, match="angles need every parameter's gradient"):
                optimizer.step()
            continue
        optimizer.step()
        released = 12 * float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert 0 < released <= 12


def test_counts_of_a_batch_that_was_not_drawn_are_not_released():
    """A step that is refused had moved its counts into the next release already."""
    clip = AdaptiveBackwardClip(1e-6, count_std=1.0)
    model = lipschitz.Sequential(lipschitz.BoundedInput((5,), 1.0), lipschitz.SpectralDense(5, 3), clip)
    dataset = TensorDataset(records().tensors[0], records().tensors[1])
    _, optimizer, loader = private(dataset, model, noise_multiplier=1e-3, mechanism="clipless", criterion=LOSS)
    x, y = dataset.tensors
    LOSS(model(x), y).backward()
    with pytest.raises(RuntimeError, match="not drawn"):
        optimizer.step()
    for x, y in loader:
        LOSS(model(x), y).backward()
        before = clip.pending
        assert clip.total == 0
        assert abs(before) <= 6
        optimizer.step()


def test_batches_announced_by_hand_are_not_taken_for_draws():
    """Who is in them is not known here: fixed batches cost what a release costs that everybody is in."""
    from erlangen import RowMap
    from erlangen.accounting import epsilon, gaussian

    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.zeros(40, dtype=torch.long)
    module, engine = nn.Linear(4, 2), erlangen.PrivacyEngine(seed=0)
    plain = DataLoader(TensorDataset(x, y), batch_size=4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer, loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=plain, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(batch), labels).backward()
        optimizer.step()
    drawn = engine.get_epsilon(1e-5)
    assert drawn < epsilon([(gaussian(1.0), 1)], 1e-5)
    for batch, labels in plain:
        optimizer.zero_grad()
        engine.training.announce(RowMap.regular(len(batch)))
        nn.functional.cross_entropy(module(batch), labels).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) >= epsilon([(gaussian(1.0), 10)], 1e-5)


# -- labels that a loss leaves out ----------------------------------------------------------------------------------------


class Listed(Dataset):
    """Labels in a list, as torchvision keeps them, or read with each record."""

    def __init__(self, x: Tensor, y: Tensor, kept: bool) -> None:
        self.x, self.wanted = x, y.tolist()
        if kept:
            self.targets = y.tolist()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        return self.x[k], self.wanted[k]


@pytest.mark.parametrize(
    "made",
    [
        TensorDataset,
        lambda x, y: Listed(x, y, kept=True),
        lambda x, y: Listed(x, y, kept=False),
        lambda x, y: Subset(TensorDataset(x, y), range(2, 90)),
    ],
    ids=["tensors", "targets", "read", "subset"],
)
def test_a_mean_over_those_who_have_a_label_is_refused(made):
    """None of the three records that were looked at lacked one: a labelled record more moved the sum by 1.8 bounds."""
    x, y = torch.randn(96, 5), torch.arange(96) % 3
    y[torch.arange(96) % 12 == 6] = -100  # at none of the ends, nor in the middle
    y[2:4] = 1
    losses = (nn.CrossEntropyLoss(), lambda logits, labels: F.cross_entropy(logits, labels))
    for criterion in losses:
        with pytest.raises(MixesSamples, match="ignored labels under 'mean'"):
            private(made(x, y), criterion=criterion)
        private(made(x, y.clamp(min=0)), criterion=criterion)
    private(made(x, y), criterion=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")


def test_what_a_record_with_a_label_moves_among_those_without():
    def released(count: int) -> Tensor:
        x, y = torch.zeros(101, 5), torch.full((101,), -100)
        x[:, 0], y[:13], y[100] = 0.17, 0, 1
        x[100] *= 1000
        model = nn.Linear(5, 2, bias=False)
        nn.init.zeros_(model.weight)
        _, optimizer, loader = private(TensorDataset(x[:count], y[:count]), model, check=False)
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return model.weight.detach() * count

    assert float((released(101) - released(100)).norm()) > 1.7
