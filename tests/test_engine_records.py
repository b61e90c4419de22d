"""What a loader, a loss or a shared mechanism can do to make one record count for many."""

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
    loading = {k: options.pop(k) for k in ("sampler", "collate_fn", "num_workers") if k in options}
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
