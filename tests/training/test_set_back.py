"""Runs that are set back to an earlier state, or broken off, in the process that made it: what was released stays released, and
neither noise nor batches are drawn a second time."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from erlangen.accounting import epsilon
from erlangen.data.base import Dataset
from erlangen.mechanisms import SecureNoise, StreamNoise
from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate
from erlangen.sampling import PoissonSampler
from erlangen.training.config import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.session import Session

CONFIG = TrainConfig(
    data="toy", model="cnn", epsilon=None, noise_multiplier=1.0, batch=20, steps=12, lr=1.0, momentum=0.0, ema=0.0, device="cpu"
)


def toy() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (100, 1, 8, 8)).astype(np.float32)
    return Dataset("toy", x, (x.mean((1, 2, 3)) > 0).astype(np.int64), None, None, 2)


def moves(session: Session, steps: int) -> list[torch.Tensor]:
    """How each of the next steps moves the weights."""
    found = []
    for _ in range(steps):
        before = torch.cat([p.detach().flatten().clone() for p in session.model.parameters()])
        session.step()
        found.append(torch.cat([p.detach().flatten() for p in session.model.parameters()]) - before)
    return found


@pytest.mark.parametrize("options", [{}, {"sampling": "importance"}, {"mechanism": "geodp"}])
def test_a_session_that_is_set_back_draws_noise_and_batches_of_its_own(options):
    """With the same noise on other weights the difference of two steps is a difference of gradients, and nothing hides it."""
    session = Session(dataclasses.replace(CONFIG, **options), toy())
    session.step()
    state = copy.deepcopy(session.state_dict())
    first = moves(session, 3)
    for _ in range(2):
        session.load_state_dict(state)
        again = moves(session, 3)
        assert not any(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        if not options:  # the noise has norm σC√d/B, that of a difference √2 times as much
            apart = torch.stack([(a - b).norm() / a.norm() for a, b in zip(first, again, strict=True)])
            assert bool((apart > 1.0).all())
        first = again
    assert session.accountant.steps == 10, "what was released before stays counted"


def test_a_seeded_session_that_is_set_back_does_the_same_again():
    session = Session(dataclasses.replace(CONFIG, seed=3), toy())
    state = copy.deepcopy(session.state_dict())
    first = moves(session, 2)
    session.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(first, moves(session, 2), strict=True))


@pytest.mark.parametrize("seed", [None, 5])
def test_augmentation_and_masks_are_drawn_once_unless_they_are_seeded(seed):
    """By position: the same again for another batch, and one record more would move what all that follow have in common."""
    session = Session(dataclasses.replace(CONFIG, seed=seed, views=4, augment="shift"), toy())
    drawn, plain = [], session.backward

    def noted(records, labels, moves, owner):
        drawn.append((moves[:20].clone(), torch.initial_seed()))
        return plain(records, labels, moves, owner)

    session.backward = noted
    state = copy.deepcopy(session.state_dict())
    for _ in range(3):
        session.load_state_dict(state)
        session.step()
    for k in (1, 2):
        assert torch.equal(drawn[0][0], drawn[k][0]) == (seed is not None)
        assert (drawn[0][1] == drawn[k][1]) == (seed is not None)
    assert torch.equal(drawn[1][0], drawn[2][0]) == (seed is not None)


@pytest.mark.parametrize("seed", [None, 5])
def test_masks_of_an_ensemble_are_drawn_once_unless_they_are_seeded(seed, monkeypatch):
    runs, seeds = ensemble(seed=seed), []
    monkeypatch.setattr("erlangen.training.ensemble.seed_layers", seeds.append)
    start = copy.deepcopy(runs.state_dict())
    for _ in range(2):
        runs.load_state_dict(start)
        runs.run(1)
    assert (seeds[0] == seeds[1]) == (seed is not None)


@pytest.mark.parametrize("seed", [None, 5])
def test_batches_are_drawn_once_unless_they_are_seeded(seed):
    sampler, rule = PoissonSampler(200, 50, seed), ImportanceSampling(0.25, 1.0, seed=seed)
    draws = (sampler.draw, lambda: rule.draw(torch.ones(200))[0])
    before = [[draw() for _ in range(3)] for draw in draws]
    for _ in range(2):
        sampler.load_state_dict({"step": 1})
        rule.load_state_dict({"step": 1})
        after = [[draw() for _ in range(2)] for draw in draws]
        for first, again in zip(before, after, strict=True):
            assert [torch.equal(a, b) for a, b in zip(first[1:], again, strict=True)] == [seed is not None] * 2
        before = [[first[0], *again] for first, again in zip(before, after, strict=True)]


@pytest.mark.parametrize("seed", [None, 5])
def test_noise_is_drawn_once_unless_it_is_seeded(seed):
    noise, zero = StreamNoise(seed), torch.zeros(50)

    def drawn() -> torch.Tensor:
        noise.next_release()
        return noise.perturb(zero, 1.0)

    start = noise.state_dict()
    first = drawn()
    noise.load_state_dict(start)
    assert torch.equal(first, drawn()) == (seed is not None)
    assert SecureNoise().state_dict() == {}


def test_a_judge_that_is_set_back_decides_with_other_records_and_other_noise():
    judge = SelectiveUpdate(200, 50, 1.0, lambda event: None)
    start = copy.deepcopy(judge.state_dict())
    first = judge.batch()
    judge.load_state_dict(start)
    assert not torch.equal(first, judge.batch())


# -- ensembles ----------------------------------------------------------------------------------------------------------


def ensemble(**changes) -> Ensemble:
    config = dataclasses.replace(CONFIG, model="mlp", **changes)
    return Ensemble([config, config], toy(), graph=False)


class Stop(Exception):
    """Somebody breaks a run off."""


def broken_off(runs: Ensemble, where: str, after: int) -> int:
    """How many releases were made until the ``after``th call of a part of a step was broken off."""
    plain, calls, released = getattr(runs, where), 0, 0
    finish = runs._finish

    def counted() -> None:
        nonlocal released
        released += 1
        finish()

    def stopping() -> None:
        nonlocal calls
        calls += 1
        plain() if where != "_finish" else counted()
        if calls == after:
            raise Stop

    runs._finish = counted
    setattr(runs, where, stopping)
    with pytest.raises(Stop):
        runs.run()
    del runs._finish
    runs.__dict__.pop(where, None)
    return released


def test_an_ensemble_that_was_broken_off_counts_what_it_released():
    runs = ensemble()
    made = broken_off(runs, "_finish", 7)
    assert made == 7
    assert runs.step_count == 6
    runs.run(3)
    assert runs.releases >= made + 3
    runs.run()
    assert runs.step_count == 12
    assert runs.releases >= made + 6


@pytest.mark.parametrize("mechanism", ["iso", "geodp"])
def test_nothing_of_a_broken_step_is_in_the_next_release(mechanism):
    """A record in both would count twice."""
    runs = ensemble(mechanism=mechanism, noise_multiplier=0.0)
    broken_off(runs, "_accumulate", 3)
    assert float(runs.total.norm()) > 0
    state = runs.state_dict()
    assert all(float(state["family"][name].norm()) == 0 for name in state["family"] if name == "magnitude")
    broken_off(runs, "_accumulate", 3)
    add, held = runs.family.add, []

    def seen(gradients, present, total) -> None:
        held.extend(float(t.norm()) for t in (total, *runs.family.state.get("magnitude", ())))
        add(gradients, present, total)

    runs.family.add = seen
    runs.run(1)
    first = 1 + len(runs.family.state.get("magnitude", ()))  # the sum, and the magnitude of every member
    assert held[:first] == [0.0] * first


def test_an_ensemble_that_is_set_back_draws_other_batches_and_keeps_its_releases():
    runs = ensemble()
    runs.run(4)
    state = runs.state_dict()
    first = runs.batches.draw(4)[0]
    runs.run(2)
    runs.load_state_dict(state)
    assert runs.releases == 6
    assert not np.array_equal(np.sort(first, -1), np.sort(runs.batches.draw(4)[0], -1))


def test_releases_of_another_ensemble_do_not_stand_for_its_own():
    """Five releases of one and five of another, whose state it goes on from, are ten; the same five twice are five."""
    runs, others = ensemble(), ensemble()
    runs.run(5)
    others.run(5)
    runs.load_state_dict(others.state_dict())
    runs.run(3)
    assert runs.releases == 13
    assert runs.epsilon(0) == pytest.approx(epsilon([(runs._events[0], 13)], runs.configs[0].delta))
    others.load_state_dict(runs.state_dict())
    assert others.releases == 13
    fresh = ensemble()
    fresh.load_state_dict(others.state_dict())
    assert fresh.releases == 13


def test_what_an_ensemble_costs_is_settled_when_its_noise_is():
    runs = ensemble()
    runs.run(2)
    spent = runs.epsilon(0)
    runs.mechanisms[0].noise_multiplier = 100.0  # the noise of its releases was made at σ = 1
    assert runs.epsilon(0) == spent
