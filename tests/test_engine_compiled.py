"""PrivacyEngine with modules that torch.compile has compiled: whole, in part, before or after they were called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.workers import Workers
from tests.processes import together

BACKEND = "aot_eager"


class Scaled(nn.Module):
    """A parameter of its own: torch.func differentiates it, with the layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Conv2d(4, 4, 1), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.scaled, self.head = Scaled(), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scaled(self.body(x)).flatten(1))


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=BACKEND)
    return module


def a_part(name: str):
    def compiled(module: nn.Module) -> nn.Module:
        setattr(module, name, torch.compile(getattr(module, name), backend=BACKEND))
        return module

    return compiled


COMPILED = {
    "whole": lambda module: torch.compile(module, backend=BACKEND),
    "in place": in_place,
    **{name: a_part(name) for name in ("body", "scaled", "head")},
}


def loader(batch: int = 8) -> DataLoader:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(32, 2, 4, 4, generator=g)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=batch)


def private(module: nn.Module, engine: erlangen.PrivacyEngine, batch: int = 8):
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    return engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader(batch), noise_multiplier=1.0, max_grad_norm=0.1
    )


def trained(module: nn.Module, batch: int = 8) -> torch.Tensor:
    module, optimizer, batches = private(module, erlangen.PrivacyEngine(seed=1), batch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.filterwarnings("ignore:Scaled")
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_module_trains_as_it_was_written(how, called_before):
    torch._dynamo.reset()
    model = COMPILED[how](net())
    if called_before:  # what was compiled then records nothing
        model(torch.randn(8, 2, 4, 4)).sum().backward()
        model.zero_grad()
    assert torch.equal(trained(model), trained(net()))


def test_layers_of_a_compiled_module_are_refused_by_name():
    model = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4)), backend=BACKEND)
    with pytest.raises(ValueError, match="BatchNorm1d at '2' mixes samples"):
        private(model, erlangen.PrivacyEngine())


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def test_a_compiled_module_that_mixes_records_is_refused():
    model = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(32, 4), Mixes()), backend=BACKEND)
    with pytest.raises(ValueError, match="mixes"):
        private(model, erlangen.PrivacyEngine())


def test_a_checkpoint_is_that_of_the_module_inside(tmp_path):
    first, second = erlangen.PrivacyEngine(seed=1), erlangen.PrivacyEngine(seed=1)
    model, optimizer, _ = private(torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(32, 2)), backend=BACKEND), first)
    first.save_checkpoint(path=tmp_path / "saved", module=model, optimizer=optimizer)
    plain, optimizer, _ = private(nn.Sequential(nn.Flatten(), nn.Linear(32, 2)), second)
    second.load_checkpoint(path=tmp_path / "saved", module=plain, optimizer=optimizer)
    assert torch.equal(plain[1].weight, model.get_submodule("_orig_mod.1").weight)


def wrapped(workers: Workers) -> list[torch.Tensor]:
    compiled = lambda module: torch.compile(module, backend="eager")  # noqa: E731
    both = compiled(DistributedDataParallel(small())), DistributedDataParallel(compiled(small()))
    return [trained(module, 8 // workers.count) for module in both]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def test_compiled_modules_of_several_processes_are_one_process_s():
    wanted = trained(small())
    for rank in together(2, wrapped):
        for found in rank:
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
