"""How many rows are held at once where nobody says: an estimate of the network alone, and no part of any result."""

from __future__ import annotations

import dataclasses
import resource

import numpy as np
import pytest
import torch
from torch import nn

from erlangen.data import Dataset, load
from erlangen.models import make_model
from erlangen.sampling import physical
from erlangen.training import TrainConfig
from erlangen.training.session import Session
from tests.alone import alone

CPU, DIGITS = torch.device("cpu"), load("digits")
SMALL = TrainConfig(model="mlp", steps=3, batch=64, seed=0, evaluations=1, noise_multiplier=0.0, epsilon=None, lr=0.1)


def room_for(rows: int, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session find that so many rows fit, before views."""
    monkeypatch.setattr(physical, "ON_CPU", 1 << 60)
    monkeypatch.setattr(physical, "total_bytes", lambda device: 1 << 60)
    each = (1 << 60) * physical.SHARE / Session(config, DIGITS, "").most_rows / config.views
    monkeypatch.setattr(physical, "ON_CPU", int(1.01 * each * rows * config.views))


def _noted(share, seen):
    seen.append([len(rows) for rows, _ in share.parts])
    return share


@pytest.mark.parametrize("changes", [{}, {"pad": True}, {"views": 2, "augment": "shift"}], ids=str)
def test_a_batch_that_does_not_fit_is_cut_and_nothing_else_changes(changes, monkeypatch):
    config = dataclasses.replace(SMALL, **changes)
    whole = Session(config, DIGITS, "run")
    assert whole.most_rows > 1000
    room_for(16, config, monkeypatch)
    cut = Session(config, DIGITS, "run")
    assert 8 <= cut.most_rows <= 16
    sizes = {}
    for session in (whole, cut):
        seen, units = sizes.setdefault(session is cut, []), session.units
        share = units.share
        monkeypatch.setattr(units, "share", lambda *a, seen=seen, share=share: _noted(share(*a), seen))
        for _ in range(3):
            session.step()
    assert all(len(parts) == 1 for parts in sizes[False])
    assert all(len(parts) > 1 and max(parts) <= 16 for parts in sizes[True])
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_what_is_asked_for_is_what_is_held():
    assert Session(dataclasses.replace(SMALL, max_physical_batch=7), DIGITS, "").physical_rows == 7
    padded = Session(dataclasses.replace(SMALL, pad=True), DIGITS, "")
    assert padded.physical_rows == physical.static_rows(64), "all of a batch at once, where that fits"


class Once(nn.Module):
    """Takes its scale from the first batch it sees, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.abs().mean() + torch.rand(())
        return self.linear(x) / self.scale


def test_the_module_and_its_generators_are_left_as_they_were():
    module, before = Once(), torch.random.get_rng_state()
    assert physical.fitting_rows(module, (4,), CPU) > 1
    assert module.scale is None
    assert torch.equal(before, torch.random.get_rng_state())


def test_free_memory_has_no_say(monkeypatch):
    monkeypatch.setattr(physical, "available_bytes", lambda device: 1)
    module = make_model("cnn", (3, 32, 32), 10)
    assert physical.fitting_rows(module, (3, 32, 32), CPU) >= 256


def test_a_small_machine_holds_fewer(monkeypatch):
    module = make_model("cnn", (3, 32, 32), 10)
    monkeypatch.setattr(physical, "total_bytes", lambda device: 64 << 30)
    large = physical.fitting_rows(module, (3, 32, 32), CPU)
    monkeypatch.setattr(physical, "total_bytes", lambda device: 2 << 30)
    assert 1 <= physical.fitting_rows(module, (3, 32, 32), CPU) < large


def test_wider_networks_hold_fewer():
    small, wide = (make_model("resnet9", (3, 32, 32), 10, layout=layout) for layout in ((8, 16, 32), (64, 128, 256)))
    assert physical.fitting_rows(wide, (3, 32, 32), CPU) < physical.fitting_rows(small, (3, 32, 32), CPU)


def what_a_step_takes() -> list[int]:
    """Rows at once, and bytes beyond what there was before the step."""
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    x = np.random.default_rng(0).random((2000, 3, 32, 32), dtype=np.float32)
    data = Dataset("made-up", x, np.arange(2000) % 10, None, None, 10)
    session = Session(dataclasses.replace(SMALL, model="resnet9", batch=1000), data, "run")
    before = peak()
    session.step()
    return [session.most_rows, peak() - before]


@pytest.mark.slow
def test_a_step_takes_no_more_than_the_estimate():
    rows, taken = alone(what_a_step_takes)
    assert rows < 1000
    assert taken < physical.ON_CPU
