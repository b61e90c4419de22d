"""FSDP2: nobody holds the network, and the release is that of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen import sharded
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import Tape
from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
from erlangen.training.adam_bc import AdamBC
from erlangen.workers import Workers
from tests.processes import GATHERS, together

N, B = 48, 12


def net() -> nn.Sequential:
    """Five channels over three workers: shards of unequal size, and none at all of the two outputs for the third."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))


def shard(model: nn.Sequential, workers: Workers) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (workers.count,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loader(workers: Workers) -> DataLoader:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, 4, 4, generator=g)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=B // workers.count)


def whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


def trained(workers: Workers, options: dict) -> tuple[torch.Tensor, float]:
    model = net() if workers.alone else shard(net(), workers)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    engine = erlangen.PrivacyEngine(seed=0)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.7, "max_physical_batch": 3, "check": False, **options}
    _, _, batches = engine.make_private(module=model, optimizer=optimizer, data_loader=loader(workers), **options)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([whole(p).flatten() for p in model.parameters()]), engine.get_epsilon(1e-5)


def all_trained(workers: Workers) -> list[tuple[torch.Tensor, float]]:
    return [trained(workers, options) for options in ({}, {"clipping": "per-layer"}, {"clipping": "auto-s"})]


@GATHERS
def test_without_noise_shards_train_what_one_process_trains():
    alone = all_trained(Workers())
    for ranks in together(3, all_trained):
        for one, several in zip(alone, ranks, strict=True):
            assert float((one[0] - several[0]).abs().max()) <= 1e-6
            assert one[1] == several[1]


def with_metric(workers: Workers) -> torch.Tensor:
    """A metric that was read off the whole network, which is split afterwards; noise included."""
    model = net()
    rule = make_clipping("flat", 0.7)
    mechanism = make_mechanism("rep", Context(0.5, rule, StreamNoise(0), model, B, {}))
    model = model if workers.alone else shard(model, workers)
    optimizer = AdamBC(model.parameters(), 0.01, floor=1e-3)  # a small floor amplifies the rounding of sums
    engine = erlangen.PrivacyEngine(seed=0)
    _, _, batches = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader(workers), mechanism=mechanism, check=False
    )
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([whole(p).flatten() for p in model.parameters()])


@GATHERS
def test_a_diagonal_metric_is_that_of_the_whole_network():
    alone = with_metric(Workers())
    assert all(float((alone - rank).abs().max()) <= 1e-5 for rank in together(3, with_metric))


def releases(workers: Workers, count: int, source: str, broken: bool = False) -> torch.Tensor:
    """Private gradients of empty batches, gathered from all shards: nothing but noise, [count, d]."""
    model = shard(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), workers)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    engine = erlangen.PrivacyEngine(seed=0 if source == "seeded" else None, secure=source == "secure")
    data = DataLoader(TensorDataset(torch.zeros(16, 2)), batch_size=2)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.5, max_grad_norm=2.0, check=False
    )
    training = engine.training
    assert training is not None
    if broken:  # the twin: everybody draws the same stream for what it holds
        training.mechanism.noise = StreamNoise(0)
        training.mechanism.noise.seeded = False
    out = []
    for _ in range(count):
        training.announce(RowMap.regular(0))
        model(torch.zeros(0, 2)).sum().backward()
        optimizer.step()
        out.append(torch.cat([whole(p.grad).flatten() for p in model.parameters()]))
    return torch.stack(out)


def check_noise(seen: torch.Tensor, std: float) -> None:
    scaled = seen.double() / std
    n, d = scaled.shape
    assert float(scaled.square().mean()) == pytest.approx(1.0, abs=6 * (2 / (n * d)) ** 0.5)
    assert float((scaled.T @ scaled / n - torch.eye(d)).abs().max()) < 6 * (2 / n) ** 0.5
    assert float((scaled[1:] * scaled[:-1]).mean(0).abs().max()) < 6 / n**0.5


@GATHERS
@pytest.mark.parametrize("source", ["seeded", "unseeded", "secure"])
def test_every_coordinate_gets_noise_once(source):
    check_noise(together(2, releases, 150, source)[0], 1.5 * 2.0 / 4.0)


@GATHERS
def test_shared_noise_is_caught():
    with pytest.raises(AssertionError):
        check_noise(together(2, releases, 80, "seeded", True)[0], 1.5 * 2.0 / 4.0)


@GATHERS
def test_seeded_noise_belongs_to_coordinates_not_to_processes():
    two, three = (together(count, releases, 3, "seeded")[0] for count in (2, 3))
    assert torch.allclose(two * 4.0, three * 6.0, rtol=1e-6), "the noise of a sum changed with the number of shards"


def refused(workers: Workers) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def attempt(model: nn.Module, engine: erlangen.PrivacyEngine | None = None, **options) -> str:
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "check": False, **options}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            (engine or erlangen.PrivacyEngine()).make_private(
                module=model, optimizer=optimizer, data_loader=loader(workers), **options
            )
        except ValueError as error:
            return str(error)
        return "accepted"

    partly = net()
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (2,)))
    both_ways = fully_shard(net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    return [
        attempt(shard(net(), workers), clipping="adaptive"),
        attempt(shard(net(), workers), mechanism="geodp"),
        attempt(shard(net(), workers), mechanism="rep"),
        attempt(shard(net(), workers), denoiser=lambda g, v: g),
        attempt(partly),
        attempt(both_ways),
        attempt(shard(net(), workers), erlangen.PrivacyEngine(distributed=False)),
    ]


def test_what_is_not_proved_is_refused():
    parts = ("not proved", "not proved", "build it before", "denoiser", "whole module", "mesh", "alone")
    for said in together(2, refused):
        for text, part in zip(said, parts, strict=True):
            assert part in text, said


def test_a_pytorch_that_cannot_gather_on_a_cpu_is_told(monkeypatch):
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    model = net()
    with pytest.raises(ValueError, match=r"install PyTorch 2\.7 or newer"):
        sharded.record_gathered(model, Tape(dict(model.named_parameters())))
