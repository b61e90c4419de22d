"""What a clipless step adds to a plain one: a handful of operators, one projection, and no look at the device."""

from __future__ import annotations

import pytest
import torch

from erlangen.models.lipschitz import lipschitz_vgg
from tests.scripts import script

benchmark = script("clipless")


@pytest.fixture
def network():
    torch.manual_seed(0)
    return lipschitz_vgg((3, 8, 8), size=(2, 4, 4))


def test_few_operators_are_added(network):
    found = benchmark.operators(network)
    outside = found["clipless"]["operators"] - found["clipless"]["replayed"]
    assert outside - found["plain"]["operators"] <= 20


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_never_waits_for_the_device(network, every):
    """Reading a number from a tensor is what makes a GPU wait."""
    x, y = torch.rand(4, 3, 8, 8), torch.randint(10, (4,))
    step = benchmark.private(network, x, y, "clipless", certify_every=every)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    assert not [
        e.name for e in profile.events() if e.name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
    ]


def test_what_is_left_out_is_named(network, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(benchmark, "ghost", full)
    found = benchmark.measure(network, torch.rand(4, 3, 8, 8), torch.randint(10, (4,)), 1, 10)
    assert found["opacus ghost"] == {"left_out": "OutOfMemoryError"}
    assert len(found["clipless"]["times"]) == 1
    assert found["plain"]["ratio"] == 1.0
