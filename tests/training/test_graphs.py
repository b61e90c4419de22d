"""Recorded parts: what is replayed adds what the ordinary part adds, and what cannot be recorded is refused."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from erlangen.training.graphs import PartGraph, Unrecordable, Watch, unchanged
from erlangen.training.session import Session
from tests.training.recordings import BASE, DIGITS, Counts, Kept, alike, dropping, flat, kept, model_named, run, session


@pytest.mark.parametrize("changes", [
    {}, {"views": 3, "augment": "shift"}, {"views": 2, "augment": "flip-crop-mix"},
    {"clipping": "auto-s"}, {"clipping": "per-layer"}, {"model": "mlp"}, {"model": "lenet"},
    {"model": "c8-tiny", "batch": 16}, {"strategy": "norms-first"}, {"strategy": "materialise"}, {"mechanism": "spectral"},
    {"optimizer": "adam-bc", "lr": 1e-3}, {"denoise": "james-stein"}, {"precision": "bf16"}, {"batch": 1.5},
], ids=str)  # fmt: skip
def test_replayed_parts_give_the_weights_of_ordinary_ones(changes):
    plain, replayed = (run(session(recorder=r, **changes)) for r in (None, kept))
    assert replayed.graph is not None
    assert replayed.graph.reason is None
    assert alike(replayed, plain)
    assert replayed.epsilon() == plain.epsilon()
    assert replayed.accountant.steps == plain.accountant.steps == 5


def test_a_part_may_begin_behind_a_frozen_trunk():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model[1].requires_grad_(False)
        return model

    with model_named(build) as name:
        plain, replayed = (run(session(recorder=r, steps=60, **name)) for r in (None, kept))
    assert replayed.graph.reason is None
    assert replayed.graph.records.x.shape[1:] == (32,), "features, not images"
    assert alike(replayed, plain)


def test_a_batch_that_overflows_its_padding_is_replayed_in_parts():
    plain, replayed = (session(recorder=r, max_physical_batch=16, noise_multiplier=0.0) for r in (None, kept))
    parts: list[int] = []
    for made in (plain, replayed):
        made._parts = lambda drawn=made._parts: (lambda p: parts.append(len(p)) or p)(drawn())
        run(made)
    assert max(parts) >= 3
    assert len(set(parts)) > 1
    assert parts[:5] == parts[5:]
    assert alike(replayed, plain)
    assert replayed.accountant.steps == 5
    whole = run(session(noise_multiplier=0.0))  # nothing was left out: one large part gives the same
    torch.testing.assert_close(flat(replayed), flat(whole), rtol=1e-4, atol=1e-6)


def test_a_run_is_resumed_in_the_middle_and_may_change_over():
    straight = run(session(recorder=kept), 6)
    for first, second in ((kept, kept), (None, kept), (kept, None)):
        begun = run(session(recorder=first), 3)
        resumed = session(recorder=second)
        resumed.load_state_dict(begun.state_dict())
        assert alike(run(resumed, 3), straight)


def test_noise_is_drawn_once_per_logical_batch_and_outside():
    made = session(recorder=kept, max_physical_batch=16)
    noise, releases = made.training.mechanism.noise, []
    opened = noise.next_release
    noise.next_release = lambda: (releases.append(made.step_count), opened())[1]
    run(made)
    assert releases == [0, 1, 2, 3, 4], "recording draws none, and every logical batch once"


def test_recording_leaves_no_trace():
    made, other = session(recorder=kept, seed=None), session(seed=None)
    before = {n: t.clone() for n, t in made.state_dict()["model"].items()}
    state = torch.get_rng_state()
    assert made.graph.ready()
    assert not other.training._pending
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in made.state_dict()["model"].items())
    assert made.accountant.steps == 0
    assert all(p.grad is None for p in made.model.parameters())
    assert all(not t.any() for t in made.training.mechanism.clipped_sum().values()), "made-up sums are forgotten"


def test_private_records_are_not_read_before_they_are_drawn():
    """Whether a recording is used must not depend on anybody's data: with nothing but NaN it is made all the same."""
    made = Session(BASE, dataclasses.replace(DIGITS, x_train=np.full_like(DIGITS.x_train, np.nan)))
    made.graph = PartGraph(made, kept)
    assert made.graph.ready()
    assert made.graph.records.x[1:9].isfinite().all()


def test_records_that_nobody_expected_count_as_they_do_in_ordinary_parts():
    """Made-up records are all that a recording has seen: huge ones, empty ones and NaN must be clipped or left out anyway."""
    strange = DIGITS.x_train.copy()
    strange[::3] *= 1e3
    strange[1::9] = np.nan
    strange[2::9] = 0
    data = dataclasses.replace(DIGITS, x_train=strange)
    plain, replayed = (Session(dataclasses.replace(BASE, noise_multiplier=0.0), data) for _ in range(2))
    replayed.graph = PartGraph(replayed, kept)
    assert alike(run(replayed), run(plain))
    assert replayed.graph.reason is None
    assert flat(replayed).isfinite().all()
    rows, owner, moves = replayed._parts()[0]
    alone = torch.where(torch.arange(len(owner)) < 1, owner, -1)  # one record by itself adds at most C
    for k in range(12):
        replayed.graph.add(rows.roll(k), alone, moves, first=True)
        size = torch.cat([t.flatten() for t in replayed.graph.sums.values()]).norm()
        assert size <= replayed.config.max_grad_norm


def test_secure_noise_is_drawn_outside():
    made = run(session(recorder=kept, seed=None, secure=True), 2)
    assert made.graph.reason is None
    assert made.accountant.steps == 2


# -- random layers --------------------------------------------------------------------------------------------------


class Raw(nn.Module):
    """Parameters without a rule: the functional fallback, with a random layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.drop = nn.Parameter(torch.ones(64)), nn.Linear(64, 10), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(x.flatten(1) * self.scale))


@pytest.mark.parametrize("build", [dropping, Raw])
def test_every_replay_drops_other_units(build):
    with model_named(build) as name:
        plain, replayed = (run(session(recorder=r, **name)) for r in (None, kept))
        assert replayed.graph.reason is None
        assert alike(replayed, plain)
        made, sums = session(recorder=kept, **name), []
        made.step()
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            made.graph._sum_from_zero(made.graph.sums)
            made.graph._replay()
            sums.append(torch.cat([t.flatten() for t in made.graph.sums.values()]))
        torch.testing.assert_close(sums[0], sums[1])
        assert not torch.equal(sums[0], sums[2])


# -- what a recording rests on --------------------------------------------------------------------------------------


def counting(calls: list[int]) -> Callable[..., Any]:
    return lambda part: (calls.append(1), kept(part))[1]


@pytest.mark.parametrize("change", [
    lambda s: setattr(s.training.mechanism.clipping, "bound", 0.25),
    lambda s: s.model.eval(),
    lambda s: [setattr(p, "data", p.data.clone()) for p in s.model.parameters()],
])  # fmt: skip
def test_a_changed_fact_is_recorded_anew(change):
    calls: list[int] = []
    plain, replayed = session(), session(recorder=counting(calls))
    for made in (plain, replayed):
        run(made, 2)
        change(made)
        run(made, 2)
    assert len(calls) == 2
    assert alike(replayed, plain)


def test_unchanged_facts_are_recorded_once_and_evaluation_changes_none():
    calls: list[int] = []
    made = session(recorder=counting(calls))
    for _ in range(3):
        run(made, 1)
        made.evaluate()
    assert calls == [1]


def test_an_abandoned_batch_is_not_released():
    plain, replayed = (session(recorder=r, max_physical_batch=16) for r in (None, kept))
    run(replayed, 1)
    rows, owner, moves = replayed._parts()[0]
    replayed.sampler.load_state_dict(run(plain, 1).sampler.state_dict())
    replayed._announce(rows, owner, True, False)
    replayed.graph.add(rows, owner, moves, first=True)
    replayed.optimizer.step()
    assert alike(run(replayed, 2), run(plain, 2))


def test_a_sum_that_was_begun_anew_is_noticed():
    made = session(recorder=kept, max_physical_batch=16)
    made.graph.ready()
    rows, owner, moves = made._parts()[0]
    made._announce(rows, owner, True, False)
    made.graph.add(rows, owner, moves, first=True)
    made.training.mechanism.bind(made.training.tape.parameters, made.sampler.expected_batch)
    with pytest.raises(RuntimeError, match="begun anew"):
        made.graph.add(rows, owner, moves, first=False)


def test_the_bound_may_not_move_between_parts_and_noise():
    made = session(recorder=kept)
    made.graph.ready()
    rows, owner, moves = made._parts()[0]
    made._announce(rows, owner, True, True)
    made.graph.add(rows, owner, moves, first=True)
    made.training.mechanism.clipping.bound = 3.0
    with pytest.raises(RuntimeError, match="bound moved"):
        made.optimizer.step()


# -- what is refused ------------------------------------------------------------------------------------------------


class Rolls(Counts):
    """Rolls the host's dice (here without consequences)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(1)) * (1.0 if random.random() < 2 else 0.0)


class Writes(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x.flatten(1))


@pytest.mark.parametrize(("build", "reason"), [
    (Counts, "attribute"), (Rolls, "random numbers on the host"), (Writes, "writes to a buffer"),
])  # fmt: skip
def test_modules_that_keep_books_are_refused_and_left_as_they_were(build, reason):
    with model_named(build) as name:
        made = session(recorder=kept, **name)
        with pytest.warns(UserWarning, match=reason):
            assert not made.graph.ready()
        assert not any(b.any() for b in made.model.buffers())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(made, 2)  # says it once
        assert made.accountant.steps == 2


@pytest.mark.parametrize(("changes", "reason"), [
    ({"pad": False}, "pad=true"), ({"clipping": "adaptive"}, "AdaptiveQuantile asks"),
    ({"non_private": True}, "loss of every part"), ({"mechanism": "geodp"}, "more than a sum"), ({"selective": True}, "selective"),
    ({"sampling": "importance"}, "importance"),
], ids=str)  # fmt: skip
def test_options_under_which_parts_cannot_be_recorded(changes, reason):
    with pytest.warns(UserWarning, match=reason):
        made = session(recorder=kept, **changes)
    run(made, 1)
    assert made.accountant.steps == 1


def test_hooks_are_refused_whenever_they_come():
    made = run(session(recorder=kept), 1)
    next(m for m in made.model.modules() if isinstance(m, nn.Conv2d)).register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks"):
        run(made, 1)


def test_units_of_several_records_are_refused():
    grouped = dataclasses.replace(DIGITS, unit=torch.arange(len(DIGITS)).div(3, rounding_mode="floor").numpy())
    made = Session(dataclasses.replace(BASE, unit="person"), grouped)
    with pytest.warns(UserWarning, match="several records"):
        made.graph = PartGraph(made, kept)


def test_without_a_gpu_the_option_changes_nothing():
    with pytest.warns(UserWarning, match="graphs are for a GPU"):
        made = session(graph=True)
    assert alike(run(made), run(session()))


# -- broken recorders are caught ------------------------------------------------------------------------------------


def stale(part: Callable[[], None]) -> Callable[[], None]:
    """Repeats the sum of the records it was recorded with."""
    return lambda: None


def half(part: Callable[[], None]) -> Callable[[], None]:
    """Forgets the last operation of the part: one parameter's sum, or all of them."""
    mode = Kept()
    with mode:
        part()
    mode.calls.pop()
    return mode.replay


def fails(part: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")


@pytest.mark.parametrize(("recorder", "reason"), [(stale, "made-up"), (half, "made-up"), (fails, "not permitted")])
def test_a_wrong_recording_is_not_used(recorder, reason):
    made = session(recorder=recorder)
    with pytest.warns(UserWarning, match=reason):
        run(made)
    assert "\n" not in made.graph.reason
    assert alike(made, run(session()))


def test_a_look_at_values_would_be_repeated():
    """The broken twin of `blind`: a part that asks whether a gradient is finite takes the answer of the made-up records."""
    made = session(recorder=kept)
    made.graph._blind_part = made.graph._part
    with pytest.warns(UserWarning, match="made-up"):
        assert not made.graph.ready()


def test_the_watch_sees_looks_and_what_is_read():
    table, x = torch.arange(4.0), torch.randn(4)
    with Watch("cpu") as watch:
        y = x * 2
        (y + table).sum()
    assert {s.data_ptr() for s in watch.read} == {t.untyped_storage().data_ptr() for t in (table, x)}
    for look in (lambda: bool(x.any()), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.sum().item()):
        with pytest.raises(Unrecordable, match="host read"), Watch("cpu"):
            look()


def test_numbers_that_the_host_draws_are_noticed():
    model = nn.Linear(2, 2)
    with unchanged(model, torch.device("cuda")):
        model(torch.ones(1, 2))
    with pytest.raises(Unrecordable, match="random numbers"), unchanged(model, torch.device("cuda")):
        torch.rand(1)
