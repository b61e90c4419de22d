"""Going on from a file of `PrivacyEngine.save_checkpoint` is as if nothing had happened, and nothing spent is forgotten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import EventError
from erlangen.training.checkpoint import CheckpointError
from erlangen.training.checkpoint import load as read
from erlangen.training.checkpoint import save as save_run

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def private(seed=None, sigma=1.0, fetchers=0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    engine = PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(X, Y), 10, num_workers=fetchers),
        noise_multiplier=sigma, max_grad_norm=0.5, **options,
    )  # fmt: skip
    return engine, model, optimizer, loader


def epochs(count, model, optimizer, loader):
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"clipping": "adaptive"}, {"max_physical_batch": 4}], ids=str)
def test_a_resumed_training_is_the_uninterrupted_one(options, tmp_path):
    engine, *whole = private(seed=3, **options)
    epochs(3, *whole)
    first, *parts = private(seed=3, **options)
    epochs(1, *parts)
    first.save_checkpoint(path=tmp_path / "c", module=parts[0], optimizer=parts[1], checkpoint_dict={"epoch": 1})
    second, *rest = private(seed=3, **options)
    assert second.load_checkpoint(path=tmp_path / "c", module=rest[0], optimizer=rest[1]) == {"epoch": 1}
    epochs(2, *rest)
    for a, b in zip(whole[0].parameters(), rest[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.accountant.history == engine.accountant.history
    assert second.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def until(steps, engine, model, optimizer, loader):
    while engine.accountant.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.accountant.steps == steps:
                break


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 2}], ids=str)
def test_what_was_fetched_ahead_is_not_in_the_file(options, tmp_path):
    """Of batches that are cut, how many are fetched tells how large they were; and a resumed training would leave them out."""
    engine, *whole = private(seed=3, **options)
    until(9, engine, *whole)
    first, *parts = private(seed=3, fetchers=2, **options)
    until(2, first, *parts)
    assert first.training.sampler.step > 2, "nothing was fetched ahead"
    first.save_checkpoint(path=tmp_path / "c", module=parts[0], optimizer=parts[1])
    second, *rest = private(seed=3, **options)
    second.load_checkpoint(path=tmp_path / "c", module=rest[0], optimizer=rest[1])
    second.save_checkpoint(path=tmp_path / "again")
    assert [read(tmp_path / name)["sampler"] for name in ("c", "again")] == [{"step": 2}] * 2
    until(9, second, *rest)
    for a, b in zip(whole[0].parameters(), rest[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_loops_that_overlap_are_gone_on_with_after_the_last_draw_of_both(tmp_path):
    """A loop that fetched ahead, another one, and the first again: a seeded training that goes on releases no draw twice."""
    engine, model, optimizer, loader = private(seed=3, fetchers=2)
    first, released = iter(loader), []
    for batches in (first, iter(loader), first):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        released.append(engine.training.draw.step)
    assert released[0] < released[2] < released[1], "the second loop begins behind what the first one has fetched"
    engine.save_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    again, *rest = private(seed=3)
    again.load_checkpoint(path=tmp_path / "c", optimizer=rest[1])
    assert again.training.sampler.step > max(released)


def test_unseeded_trainings_draw_other_noise_after_the_same_file(tmp_path):
    first, *parts = private()
    epochs(1, *parts)
    first.save_checkpoint(path=tmp_path / "c", optimizer=parts[1])
    ends = []
    for _ in range(2):
        again, *rest = private()
        again.load_checkpoint(path=tmp_path / "c", optimizer=rest[1])
        epochs(1, *rest)
        assert again.accountant.steps == 12
        ends.append(rest[0][0].weight.detach().clone())
    assert not torch.equal(*ends)


def test_setting_back_does_not_take_releases_back(tmp_path):
    engine, model, optimizer, loader = private()
    epochs(1, model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    epochs(1, model, optimizer, loader)
    before = model[0].weight.detach().clone()
    with pytest.raises(EventError, match="stays spent"):
        engine.load_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    assert torch.equal(model[0].weight, before)
    assert engine.accountant.steps == 12


def test_the_releases_of_another_training_do_not_stand_for_ones_own(tmp_path):
    """Six steps here and six in the file cost ε = 4.6, not the 3.6 of six."""
    other, _, optimizer, _ = there = private()
    epochs(1, *there[1:])
    other.save_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    engine, model, optimizer, loader = private()
    epochs(1, model, optimizer, loader)
    with pytest.raises(EventError, match="stays spent"):
        engine.load_checkpoint(path=tmp_path / "c", optimizer=optimizer)


def test_what_does_not_fit_is_refused_or_said(tmp_path):
    engine, _, optimizer, _ = private()
    engine.save_checkpoint(path=tmp_path / "c")
    with pytest.raises(ValueError, match="saved without an optimizer"):
        engine.load_checkpoint(path=tmp_path / "c", optimizer=optimizer)
    other, *_ = private(mechanism="spectral")
    with pytest.raises(ValueError, match="saved with mechanism 'iso', not 'spectral'"):
        other.load_checkpoint(path=tmp_path / "c")
    quieter, *_ = private(sigma=2.0)
    with pytest.warns(UserWarning, match="σ was 1 when"):
        quieter.load_checkpoint(path=tmp_path / "c")
    save_run(tmp_path / "run", {"step": 1})
    with pytest.raises(CheckpointError, match="checkpoint of a run"):
        engine.load_checkpoint(path=tmp_path / "run")
    with pytest.raises(RuntimeError, match="call make_private first"):
        PrivacyEngine().load_checkpoint(path=tmp_path / "c")


def test_sigma_can_be_asked_for():
    engine, *_ = private(sigma=1.25)
    assert engine.noise_multiplier == 1.25
