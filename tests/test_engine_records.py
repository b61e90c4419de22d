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
from erlangen.data import from_torch
from erlangen.gradients.independence import MixesSamples, check_loss
from erlangen.mechanisms import GaussianMechanism


def records(count: int = 12) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(10 * torch.randn(count, 5), torch.arange(count) % 3)


def private(dataset: Dataset, module: nn.Module | None = None, engine=None, **options):
    module = nn.Linear(5, 3) if module is None else module
    loading = {k: options.pop(k) for k in ("sampler", "collate_fn") if k in options}
    batch = options.pop("batch", len(dataset))
    if "mechanism" not in options:
        options |= {"noise_multiplier": 0.0, "max_grad_norm": 1.0}
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
