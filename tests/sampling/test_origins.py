"""A record that was joined twice, under two transforms or in two data sets over the same memory, would count twice."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from erlangen import PrivacyEngine
from erlangen.sampling import records
from erlangen.sampling.origins import is_joined, origins
from erlangen.sampling.records import refuse_repeats

N, D = 100, 8


class Images(Dataset):
    """As torchvision's: images in memory, and a transform."""

    def __init__(self, data, targets, transform=None):
        self.data, self.targets, self.transform = data, targets, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return (self.data[i] if self.transform is None else self.transform(self.data[i])), self.targets[i]


class Files(Dataset):
    """As torchvision's ImageFolder."""

    def __init__(self, samples, transform=None):
        self.samples, self.transform = samples, transform

    def __len__(self):
        return len(self.samples)


class Split(Images):
    """As torchvision's MNIST: read from a folder by every instance anew."""

    def __init__(self, root, train=True, transform=None, count=20):
        super().__init__(torch.arange(count * 4.0).view(count, 4) + (0 if train else 1000), torch.zeros(count), transform)
        self.root, self.train = root, train


class Transformed(Dataset):
    """Another data set under a transform."""

    def __init__(self, dataset, transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)


def flip(t):
    return t.flip(0)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    x[0] = -50.0
    return x, torch.arange(N) % 2


WAYS = {
    "the same data set": lambda x, y: (lambda d: d + d)(TensorDataset(x, y)),
    "the same tensors": lambda x, y: TensorDataset(x, y) + TensorDataset(x, y),
    "other labels": lambda x, y: TensorDataset(x, y) + TensorDataset(x, 1 - y),
    "every second one": lambda x, y: TensorDataset(x, y) + TensorDataset(x[::2], y[::2]),
    "overlapping halves": lambda x, y: TensorDataset(x[:60], y[:60]) + TensorDataset(x[40:], y[40:]),
    "shifted crops": lambda x, y: TensorDataset(x[:, 1:], y) + TensorDataset(x[:, :-1], y),
    "an array's memory": lambda x, y: TensorDataset(x[:50], y[:50]) + TensorDataset(torch.from_numpy(x.numpy()[49:]), y[49:]),
    "two transforms": lambda x, y: ConcatDataset([Images(x, y), Images(x, y, flip)]),
    "arrays under two transforms": lambda x, y: ConcatDataset([Images(x.numpy(), y), Images(x.numpy(), y, flip)]),
    "lists under two transforms": lambda x, y: ConcatDataset([Images(list(x), y), Images(list(x), y, flip)]),
    "objects under two transforms": lambda x, y: (lambda o: Images(o, y) + Images(o[:7], y, flip))([object() for _ in x]),
    "words under two transforms": lambda x, y: (lambda o: Images(o, y) + Images(list(o), y, flip))([f"word {k % 9}" for k in y]),
    "a wrapper": lambda x, y: (lambda d: ConcatDataset([d, Transformed(d, flip)]))(TensorDataset(x, y)),
    "inside a wrapper": lambda x, y: (lambda d: Transformed(d + d, flip))(TensorDataset(x, y)),
    "stacked": lambda x, y: StackDataset(TensorDataset(x), y) + StackDataset(TensorDataset(x), 1 - y),
    "stacked tensors": lambda x, y: StackDataset(x, y) + StackDataset(x, 1 - y),
    "read from a folder twice": lambda x, y: Split("r") + Split("./r", transform=flip),
    "a copy with another transform": lambda x, y: (lambda d: d + copy.copy(d))(Split("r")),
}

#: what is not joined from the same records, as far as anybody can see
APART = {
    "copies in other memory": lambda x, y: TensorDataset(x, y) + TensorDataset(x.clone(), y.clone()),
    "halves": lambda x, y: TensorDataset(x[:50], y[:50]) + TensorDataset(x[50:], y[50:]),
    "odd and even": lambda x, y: TensorDataset(x[::2], y[::2]) + TensorDataset(x[1::2], y[1::2]),
    "the same labels": lambda x, y: TensorDataset(x, y) + TensorDataset(x + 1, y),
    "columns": lambda x, y: Subset(TensorDataset(x.T), range(D)) + TensorDataset(torch.zeros(3, N)),
    "windows": lambda x, y: Subset(TensorDataset(x.view(-1).unfold(0, 10, 2)), range(30)),
    "one row shown many times": lambda x, y: Subset(TensorDataset(x[:1].expand(N, D), y), range(N)),
    "parts of a split": lambda x, y: ConcatDataset(torch.utils.data.random_split(TensorDataset(x, y), [60, 40])),
    "two splits of a folder": lambda x, y: Split("r") + Split("r", train=False),
    "two folders": lambda x, y: Split("r") + Split("s"),
    "numbers": lambda x, y: Images(list(range(N)), list(range(N))) + Images(list(range(N)), list(range(N))),
    "other words": lambda x, y: Images(["yes", "no"], y[:2]) + Images(["no", "yes"], y[:2]),
    "sparse": lambda x, y: TensorDataset(x.to_sparse(), y) + TensorDataset((x + 1).to_sparse(), y.clone()),
    "nothing": lambda x, y: TensorDataset(x[:0], y[:0]) + TensorDataset(x, y),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_record_that_was_joined_twice_is_refused(way):
    joined = WAYS[way](*data())
    assert is_joined(joined)
    with pytest.raises(ValueError, match=r"stands in the data set 2 times .* under other transforms"):
        refuse_repeats(joined, None)
    refuse_repeats(joined, origins(joined))  # all its copies have one label
    with pytest.raises(ValueError, match="one label"):
        refuse_repeats(joined, list(range(len(joined))))


@pytest.mark.parametrize("way", APART)
def test_records_that_are_there_once_are_accepted(way):
    joined = APART[way](*data())
    refuse_repeats(joined, None)
    assert len(set(origins(joined).tolist())) == len(joined)


def test_a_folder_cut_into_parts_is_not_joined_with_itself():
    first, second = Split("r"), Split("r")
    first.data, second.data = first.data[:10], second.data[10:]
    refuse_repeats(first + second, None)


def test_files_are_known_by_their_path(tmp_path, monkeypatch):
    paths = [tmp_path / f"{k}.png" for k in range(4)]
    for path in paths:
        path.touch()
    listed = [(str(path), 0) for path in paths]
    monkeypatch.chdir(tmp_path)
    for other in (listed, [(f"./{k}.png", 1) for k in (3, 7)], [paths[2]]):
        with pytest.raises(ValueError, match="2 times"):
            refuse_repeats(Files(listed) + Files(other, flip), None)
    refuse_repeats(Files(listed[:2]) + Files(listed[2:]), None)
    frames = [(str(paths[0]), frame) for frame in range(3)]  # one file of several records
    refuse_repeats(Files(frames) + Files(listed[1:]), None)
    assert np.array_equal(origins(Files(frames) + Files(frames))[:3], origins(Files(frames) + Files(frames))[3:])


def moved(make):
    """By how much one record less moves the sum of clipped gradients, in bounds, where nobody looks."""
    sums = []
    for rows in (slice(None), slice(1, None)):
        x, y = data()
        torch.manual_seed(0)
        net, joined = nn.Linear(D, 2), make(x[rows], y[rows])
        model, optimizer, loader = PrivacyEngine(seed=0).make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), 0.0), noise_multiplier=0.0, max_grad_norm=1.0,
            data_loader=DataLoader(joined, batch_size=len(joined)),
        )  # fmt: skip
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        sums.append(len(joined) * torch.cat([p.grad.flatten() for p in net.parameters()]))
    return float((sums[0] - sums[1]).norm())


def test_a_record_that_was_joined_twice_would_count_twice(monkeypatch):
    """The broken twin: two bounds where ε is for one."""
    assert moved(TensorDataset) == pytest.approx(1.0, abs=1e-3)
    monkeypatch.setattr(records, "is_joined", lambda dataset: False)
    for way in ("the same tensors", "two transforms"):
        assert moved(WAYS[way]) > 1.9
