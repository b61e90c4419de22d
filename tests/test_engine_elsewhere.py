"""What is trained beside the private optimizer, on the same backward pass, has gradients that nothing clips."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import erlangen


class Tied(nn.Module):
    """A language model whose table is its last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.body(self.table(tokens).mean(1)), self.table.weight)


class Centres(nn.Module):
    """A loss that learns the centre of each class, as ArcFace does."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 8))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(16 * F.normalize(features) @ F.normalize(self.centres).T, labels)


def private(module: nn.Module, trained: nn.Module, x: Tensor, y: Tensor, **options):
    return erlangen.PrivacyEngine(seed=0).make_private(
        module=module, optimizer=torch.optim.SGD(trained.parameters(), 1.0), noise_multiplier=10.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), **options,
    )  # fmt: skip


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epochs: int = 1) -> None:
    """By an ordinary loop."""
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("private_first", [True, False])
def test_a_second_optimizer_gets_no_gradient_without_noise(private_first):
    """The label of one record moved the table by 1.7 bounds without any noise, at ε = 0.34."""
    torch.manual_seed(0)
    model = Tied()
    tokens, labels = torch.randint(0, 20, (30, 4)), torch.randint(0, 20, (30,))
    _, optimizer, loader = private(model, model.body, tokens, labels)
    second, before = torch.optim.SGD(model.table.parameters(), 1.0), model.table.weight.detach().clone()
    (batch,) = loader
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    if private_first:
        optimizer.step()
        second.step()
        assert torch.equal(before, model.table.weight)
    else:
        second.step()
        with pytest.raises(RuntimeError, match=r"another optimizer trains 'table\.weight'.*one optimizer"):
            optimizer.step()


def test_a_table_that_nobody_trains_is_no_mistake():
    torch.manual_seed(0)
    model = Tied()
    _, optimizer, loader = private(model, model.body, torch.randint(0, 20, (30, 4)), torch.randint(0, 20, (30,)))
    for _ in range(3):
        for tokens, labels in loader:
            F.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
        model.load_state_dict(model.state_dict())


def test_a_loss_that_learns_is_refused():
    """Its centres had their gradients as they are: one label moved them by 10 bounds, at ε = 0.34."""
    module, criterion = nn.Linear(6, 8), Centres()
    x, y = torch.randn(30, 6), torch.randint(0, 5, (30,))
    with pytest.raises(ValueError, match=r"Centres has parameters of its own \(centres\).*requires_grad_\(False\)"):
        private(module, module, x, y, criterion=criterion)
    private(module, module, x, y, criterion=criterion.requires_grad_(False))


@pytest.mark.parametrize("rest", ["private", "frozen", "new"])
def test_a_layer_that_is_put_into_the_module_later_is_not_trained_without_noise(rest):
    """A new head beside the private optimizer, or on frozen layers, or in an optimizer of all: each moved by raw gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    _, optimizer, loader = private(model, model, x, y)
    trained(model, optimizer, loader)
    if rest == "frozen":
        model.requires_grad_(False)
    model[2] = nn.Linear(8, 3)
    second = torch.optim.SGD((model if rest == "new" else model[2]).parameters(), 1.0)
    before = model[2].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'2\.weight' was put into the module.*make_private again"):
        trained(model, second, loader)
    assert torch.equal(before, model[2].weight)


def test_a_frozen_layer_may_be_put_into_the_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    _, optimizer, loader = private(model, model, x, y)
    model.insert(1, nn.Linear(8, 8).requires_grad_(False))
    trained(model, optimizer, loader)


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 3), torch.randn(40, 6), torch.randint(0, 3, (40,))


def test_a_copied_training_is_not_trained_without_noise():
    """Copies of engine, module, optimizer and loader took raw steps, and the copied engine went on telling the old ε."""
    model, x, y = small()
    engine, optimizer = erlangen.PrivacyEngine(), torch.optim.SGD(model.parameters(), 1.0)
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    trained(*made)
    for _, module, stepped, loader in (copy.deepcopy((engine, *made)), (engine, *copy.deepcopy(made))):
        before = module.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"are copies.*nothing would be clipped, noised or accounted.*make_private"):
            trained(module, stepped, loader)
        assert torch.equal(before, module.weight)
    trained(*made)  # as if nobody had copied them
    assert engine.accountant.steps == 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "loaded"])
def test_a_copy_that_is_trained_on_the_private_loader_is_said(duplicate):
    model, x, y = small()
    loader = private(model, model, x, y)[2]
    other = duplicate(model)
    with pytest.warns(UserWarning, match=r"3 batches .* elsewhere than through the private module.*make the copy private"):
        trained(other, torch.optim.SGD(other.parameters(), 1.0), _halved(loader), epochs=4)


def _halved(loader: DataLoader) -> DataLoader:
    """Two batches an epoch."""
    loader.private_sampler.expected_batch /= 2  # type: ignore[attr-defined]
    return loader


def test_validation_beside_training_and_looks_at_batches_are_not_remarked_on():
    model, x, y = small()
    model, optimizer, loader = private(model, model, x, y)
    _halved(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            next(iter(loader))
        for _ in range(3):
            trained(model, optimizer, loader)
            with torch.no_grad():
                for batch, _ in loader:
                    model(batch)
