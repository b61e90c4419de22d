"""What counts passes, or rows, counts records: how many parts a batch has depends on who was drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from erlangen.gradients.fewer import check_parts
from erlangen.gradients.independence import MixesSamples, check_independence
from erlangen.models import register_model
from erlangen.training import TrainConfig
from erlangen.training.session import Session
from tests.engines import data, loop, private


class Counts(nn.Module):
    """Counts its passes in a buffer; its layer has a rule."""

    def __init__(self, width=32):
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.layer(x.flatten(1))


class Scaled(Counts):
    """A parameter of its own takes all of it along into torch.func, which cannot batch what is written to."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * super().forward(x)


def iterated():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(32, 8)), nn.ReLU(), nn.Linear(8, 2))


class ScaledNorm(nn.Module):
    """The power iteration would run for every row."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = spectral_norm(nn.Linear(32, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * self.layer(x.flatten(1))


@pytest.mark.filterwarnings("ignore:.*row by row", "ignore:.*beside its layers")
@pytest.mark.parametrize("module", [Scaled(), ScaledNorm()], ids=["counter", "spectral norm"])
def test_a_buffer_that_would_count_rows_is_refused(module):
    with pytest.raises(MixesSamples, match=r"writes to its buffer.*count the records"):
        private(module)
    with pytest.raises(MixesSamples, match="writes to its buffer"):
        check_independence(module, (torch.randn(3, 2, 4, 4),))


@pytest.mark.parametrize("module", [Counts(), iterated()], ids=["counter", "spectral norm"])
def test_a_buffer_that_counts_the_parts_of_a_batch_is_refused(module):
    """Of 13 records instead of 12, four at a time, a fourth pass would be made: in the buffer it stays for good."""
    with pytest.raises(MixesSamples, match=r"changes with every forward pass.*max_physical_batch"):
        private(module, max_physical_batch=4)


@pytest.mark.parametrize("module", [Counts(), iterated()], ids=["counter", "spectral norm"])
def test_one_pass_a_step_tells_nothing(module):
    before = [b.clone() for b in module.buffers()]
    for limit in (None, len(data())):  # nothing is ever cut
        engine, *_ = private(module, max_physical_batch=limit)
        assert all(map(torch.equal, before, module.buffers()))
        engine.remove()
    loop(*private(module)[1:])


def test_a_session_that_cuts_batches_refuses_it_too():
    register_model("counts", lambda input_shape, classes: nn.Sequential(Counts(64), nn.Linear(2, classes)))
    config = TrainConfig(model="counts", steps=2, batch=16, epsilon=None, noise_multiplier=1.0)
    Session(config).step()
    with pytest.raises(MixesSamples, match="changes with every forward pass"):
        Session(replace(config, max_physical_batch=8))


def test_what_is_made_once_is_no_count():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 2)
            self.register_buffer("positions", torch.zeros(0))

        def forward(self, x):
            if not len(self.positions):
                self.positions = torch.linspace(0, 1, 32)
            return self.linear(x.flatten(1) + self.positions)

    module = Cached().eval()
    check_parts(module, (torch.randn(3, 2, 4, 4),))
    assert not module.training
    loop(*private(Cached(), max_physical_batch=4)[1:])
