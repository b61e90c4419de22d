"""Many runs at once are the runs they stand for: same weights without noise, same distribution with it, same cost."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing

import numpy as np
import pytest
import torch
from torch import nn

from erlangen.accounting import gaussian
from erlangen.data.base import Dataset
from erlangen.mechanisms import GaussianMechanism, PublishedGReDP, base
from erlangen.mechanisms.clipping import Flat
from erlangen.mechanisms.clipping import base as rules
from erlangen.mechanisms.frequency import Fourier
from erlangen.models import register_model
from erlangen.streams import fill_normal
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.session import Session
from tests.alone import alone
from tests.training.members import like_sessions, trained_alike

CONFIG = TrainConfig(
    data="toy", model="c8-cnn", model_options={"field_counts": (1, 2), "kernel_size": 3}, epsilon=None,
    noise_multiplier=0.0, batch=16, steps=5, lr=0.5, momentum=0.5, ema=0.9, max_grad_norm=0.5, device="cpu",
)  # fmt: skip


def toy(records: int = 100) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (records, 1, 8, 8)).astype(np.float32)
    y = (x[:, 0, 2:5, 2:5].mean((1, 2)) > 0).astype(np.int64)
    return Dataset("toy", x, y, x[:30], y[:30], 2)


def members(**changes) -> list[TrainConfig]:
    base = dataclasses.replace(CONFIG, **changes)
    return [
        dataclasses.replace(base, seed=0),
        dataclasses.replace(base, seed=1, mechanism="rep", max_grad_norm=0.7),
        dataclasses.replace(base, seed=2, mechanism="shuffle", lr=0.2, mechanism_options={"scope": "layer"}),
    ]


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_without_noise_every_member_is_its_session(rows, schedule):
    """Also where batches overflow the static size and a step takes several passes."""
    data, configs = toy(), members(schedule=schedule)
    ensemble, sessions = trained_alike(configs, data, rtol=1e-4, atol=1e-5, rows=rows)
    for k, session in enumerate(sessions):
        for name, value in ensemble.stack.state_dict(k, ensemble.average).items():
            torch.testing.assert_close(value, session.weights()[name], rtol=1e-4, atol=1e-5)
        for name, value in session.evaluate().items():
            assert ensemble.evaluate()[k][name] == pytest.approx(value, abs=1e-4)
        assert ensemble.epsilon(k) == session.epsilon() == math.inf


def test_truncating_an_overflowing_batch_would_be_caught():
    data, configs = toy(), members()
    right, broken = (like_sessions(configs, data, rows=5) for _ in range(2))
    honest = broken.batches.draw

    def truncated(steps):
        table, passes = honest(steps)
        first = np.concatenate([[0], np.cumsum(passes)[:-1]])
        return table[first], np.ones_like(passes)

    broken.batches.draw = truncated
    right.run()
    broken.run()
    assert (right.stack.flat - broken.stack.flat).abs().max() > 1e-3


def test_half_precision_stays_close():
    data = toy()
    exact, rough = (Ensemble(members(), data, precision=p) for p in (None, torch.bfloat16))
    for ensemble in (exact, rough):
        ensemble.run()
    gap = (exact.stack.flat - rough.stack.flat).norm() / exact.stack.flat.norm()
    assert 0 < gap < 0.05


class Hostile(nn.Module):
    """Gradients that explode for records with a marker."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 2)

    def forward(self, x):
        return self.linear(x.flatten(1))


register_model("hostile-test", lambda num_classes, in_channels: Hostile())


@pytest.mark.parametrize("value", [1e30, 1e15, math.nan, math.inf])
def test_no_record_contributes_more_than_the_bound(value):
    data = toy(20)
    data.x_train[3] = value
    config = dataclasses.replace(
        CONFIG, model="hostile-test", model_options={}, momentum=0.0, lr=1.0, steps=1, batch=1, seed=0
    )
    alone = Ensemble(
        [config, dataclasses.replace(config, mechanism="rep")], data, draws=[lambda n: [np.array([3])]] * 2
    )
    before = alone.stack.flat.clone()
    alone.run()
    moved = ((before - alone.stack.flat) / alone.metric).double().norm(dim=1)
    assert bool((moved <= 0.5 * (1 + 1e-5)).all())
    if not math.isfinite(value):
        assert bool((moved == 0).all())


def test_empty_batches_release_noise_alone():
    config = dataclasses.replace(CONFIG, noise_multiplier=2.0, momentum=0.0, lr=1.0, steps=400, ema=0.0)
    configs = [
        dataclasses.replace(config, seed=0),
        dataclasses.replace(config, seed=1, mechanism="rep", max_grad_norm=0.1),
    ]
    ensemble = Ensemble(configs, toy(), draws=[lambda n: [np.zeros(0, dtype=int)] * n] * 2)
    moves = []
    for _ in range(400):
        before = ensemble.stack.flat.clone()
        ensemble.run(1)
        moves.append(before - ensemble.stack.flat)
    std = torch.stack(moves).std(0)
    want = torch.stack([torch.full_like(std[0], 2.0 * 0.5 / 16), 2.0 * 0.1 / 16 * ensemble.metric[1]])
    assert ((std / want).mean(1) - 1).abs().max() < 0.02
    assert (std / want - 1).abs().max() < 0.25
    together = torch.stack(moves)
    assert abs(float((together[:, 0] * together[:, 1] / want.prod(0)).mean())) < 0.01, "members share noise"


def test_the_cost_is_that_of_a_session():
    config = dataclasses.replace(CONFIG, noise_multiplier=1.1, seed=0, steps=3)
    other = dataclasses.replace(config, noise_multiplier=None, epsilon=2.0, seed=1)
    data = toy()
    ensemble = Ensemble([config, other], data)
    assert ensemble.epsilon(0) == 0
    ensemble.run()
    session = Session(config, data)
    for _ in range(3):
        session.step()
    for method in ("pld", "rdp"):
        assert ensemble.epsilon(0, method) == pytest.approx(session.epsilon(method))
    assert 1.9 < ensemble.epsilon(1) <= 2.0


def test_a_resumed_ensemble_continues_exactly():
    data = toy()
    configs = [dataclasses.replace(c, noise_multiplier=1.0, steps=70) for c in members()]
    whole, first = Ensemble(configs, data), Ensemble(configs, data)
    whole.run()
    first.run(67)
    second = Ensemble(configs, data)
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(whole.stack.flat, second.stack.flat)
    assert torch.equal(whole.average, second.average)
    assert second.epsilon(0) == whole.epsilon(0)


def test_other_members_other_noise():
    data = toy()
    config = dataclasses.replace(CONFIG, noise_multiplier=1.0, seed=0)
    a = Ensemble([config], data, run_ids=["x"])
    b = Ensemble([dataclasses.replace(config, max_grad_norm=0.4)], data, run_ids=["x"])
    assert a.generator.initial_seed() != b.generator.initial_seed()
    assert a.generator.initial_seed() == Ensemble([config], data, run_ids=["x"]).generator.initial_seed()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"views": 2}, "views"), ({"optimizer": "adam"}, "optimizer"), ({"secure": True}, "secure"),
        ({"clipping": "adaptive"}, "flat"), ({"mechanism": "geodp", "mechanism_options": {"form": "angles"}}, "family"),
        ({"selective": True}, "selective"), ({"sampling": "importance"}, "sampling"), ({"warm_up": 3}, "warm_up"),
    ],
)  # fmt: skip
def test_what_an_ensemble_cannot_do_is_refused(change, what):
    with pytest.raises(ConfigError, match=what):
        Ensemble([dataclasses.replace(CONFIG, **change)], toy())


class Twice(GaussianMechanism):
    """Doubles its noise, and claims what that is worth."""

    def event(self, noise_multiplier=None):
        return gaussian(2 * (self.noise_multiplier if noise_multiplier is None else noise_multiplier))

    def finish(self, expected_batch):
        for total in self._sum.values():
            total.copy_(self.noise.perturb(total, 3**0.5 * self.std))
        return super().finish(expected_batch)


class Shorter(Flat):
    """Promises, and keeps, half the bound."""

    sensitivity = property(lambda self: self.bound / 2)

    def weights(self, norms):
        return super().weights(norms) / 2


@pytest.mark.parametrize("change", [{"mechanism": "twice"}, {"clipping": "shorter"}])
def test_what_a_subclass_does_otherwise_is_not_passed_over(monkeypatch, change):
    """The ensemble has code of its own for ISO: a subclass would get ISO's noise, and be charged for what it says itself."""
    build = lambda c: Twice(c.noise_multiplier, c.clipping, None, c.noise, "twice")  # noqa: E731
    monkeypatch.setitem(base._MECHANISMS, "twice", build)
    monkeypatch.setitem(rules._RULES, "shorter", Shorter)
    with pytest.raises(ConfigError, match=r"one family|clip alike"):
        Ensemble([dataclasses.replace(CONFIG, noise_multiplier=1.0, **change)], toy())


def test_members_that_clip_other_layers_together_are_refused():
    """Every tensor by itself, and (as published) the weight and the bias of a layer together."""
    base = dataclasses.replace(CONFIG, model="cnn", model_options={"width": 8}, clipping="per-layer")
    other = dataclasses.replace(base, mechanism="gredp", mechanism_options={"as_published": "complex"})
    with pytest.raises(ConfigError, match="same layers"):
        Ensemble([base, other], toy())


@pytest.mark.parametrize("change", [{}, {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}])
def test_no_record_moves_a_layer_by_more_than_the_layer_s_bound(change):
    base = dataclasses.replace(CONFIG, model="cnn", model_options={"width": 8}, clipping="per-layer", max_grad_norm=0.3, **change)
    data = toy()
    data.x_train[0] = 1e4
    for record in (0, 1):
        ensemble = Ensemble([base], data, draws=[lambda n, r=record: [np.array([r])] * n], rows=2)
        ensemble._load(np.array([[[record, -1]]], dtype=np.int32))
        ensemble._accumulate()
        moved = ensemble.stack.split(ensemble.total[0].double())
        rule = ensemble.mechanisms[0].clipping
        groups = rule.groups(list(moved))
        norms = [math.sqrt(sum(float(moved[n].square().sum()) for n in group)) for group in groups]
        assert all(norm <= bound for norm, bound in zip(norms, rule.each(len(groups)), strict=True))
        assert max(n / b for n, b in zip(norms, rule.each(len(groups)), strict=True)) > 0.99, "something is clipped"


def test_members_that_differ_in_shape_are_refused():
    with pytest.raises(ConfigError, match="batch is 8"):
        Ensemble([CONFIG, dataclasses.replace(CONFIG, batch=8)], toy())
    with pytest.raises(ConfigError, match="at least one"):
        Ensemble([], toy())


# -- families -----------------------------------------------------------------------------------------------------

FAMILIES = {
    "spectral beside iso": [
        {"mechanism": "spectral", "mechanism_options": {"ratio": 0.4}}, {"momentum": 0.0},
        {"mechanism": "spectral", "mechanism_options": {"as_published": True}},
    ],
    "gredp": [{"mechanism": "gredp"}, {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}],
    "auto-s": [{"clipping": "auto-s"}, {"clipping": "auto-s", "max_grad_norm": 0.2, "mechanism": "rep"}],
    "psac": [{"clipping": "psac"}],
    "per-layer": [
        {"clipping": "per-layer"}, {"clipping": "per-layer", "max_grad_norm": 0.2, "mechanism": "rep"},
        {"clipping": "per-layer", "mechanism": "spectral", "mechanism_options": {"ratio": 0.4}},
        {"clipping": "per-layer", "mechanism": "gredp"},
    ],
    "per-layer as published": [
        {"clipping": "per-layer", "mechanism": "spectral", "mechanism_options": {"ratio": 0.4, "as_published": True}},
        *({"clipping": "per-layer", "mechanism": "gredp", "max_grad_norm": bound, "mechanism_options": {"as_published": reading}}
          for reading, bound in (("complex", 0.5), ("real", 0.1), ("per-sample", 0.3))),
    ],
    "direction": [
        {"mechanism": "geodp"}, {"mechanism": "geodp", "mechanism_options": {"form": "shrink"}},
        {"mechanism": "geodp", "mechanism_options": {"magnitude": "scaled"}, "max_grad_norm": 0.05},
    ],
    "published": [{"mechanism": "geodp", "mechanism_options": {"as_published": True, "beta": 0.3}}],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_without_noise_every_family_is_its_session(family):
    data = toy()
    base = dataclasses.replace(CONFIG, model="cnn", model_options={"width": 8}, lr=0.2)
    configs = [dataclasses.replace(base, seed=k, **change) for k, change in enumerate(FAMILIES[family])]
    trained_alike(configs, data, rtol=1e-3, atol=2e-5, rows=9)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}, math.sqrt(0.5)),
        ({"mechanism": "spectral", "mechanism_options": {"ratio": 0.4}}, None),
        ({"mechanism": "gredp", "mechanism_options": {"as_published": "real"}}, None),
        ({"mechanism": "gredp", "mechanism_options": {"as_published": "complex", "split": (0.8, 0.6)}}, None),
        *(({"clipping": "per-layer", "mechanism": "gredp", "mechanism_options": {"as_published": reading}}, None)
          for reading in ("complex", "real", "per-sample")),
        ({"clipping": "per-layer", "mechanism": "spectral", "mechanism_options": {"ratio": 0.4, "as_published": True}}, None),
        ({"clipping": "per-layer"}, None),
        ({"mechanism": "geodp"}, None),
    ],
)
def test_the_noise_of_a_family_is_that_of_its_mechanism(change, factor):
    """Empty batches: the covariance of what is released, against the mechanism's own."""
    config = dataclasses.replace(
        CONFIG, model="cnn", model_options={"width": 8}, noise_multiplier=2.0, momentum=0.0, lr=1.0, steps=1500, ema=0.0,
        seed=0, **change,
    )  # fmt: skip
    ensemble = Ensemble([config], toy(), draws=[lambda n: [np.zeros(0, dtype=int)] * n])
    mechanism = ensemble.mechanisms[0]
    name = next(n for n, s in ensemble.stack.shapes.items() if len(s) == 4)
    moves = []
    for _ in range(1500):
        if change.get("mechanism") == "geodp":  # the query before post-processing
            moves.append(
                ensemble.family.noise(ensemble.total, ensemble.generator)[0] * ensemble.family.direction_std[0]
            )
        else:
            moves.append(ensemble.family.release(torch.zeros_like(ensemble.total), 1.0, ensemble.generator)[0])
    found = ensemble.stack.split(torch.stack(moves))[name][:, :9].double().T.cov()
    want = mechanism.covariance(name)[:9, :9]
    assert float((found - want).abs().max()) < 0.15 * float(want.abs().max())
    if factor is not None:
        assert float(found.diagonal().mean().sqrt()) == pytest.approx(2.0 * 0.5 * factor, rel=0.05)


def test_families_do_not_mix_and_published_noise_is_not_calibrated():
    other = dataclasses.replace(CONFIG, mechanism="geodp")
    with pytest.raises(ConfigError, match="one family"):
        Ensemble([CONFIG, other], toy())
    options = {"as_published": "complex"}
    claimed = dataclasses.replace(
        CONFIG, mechanism="gredp", mechanism_options=options, epsilon=1.0, noise_multiplier=None
    )
    with pytest.raises(ConfigError, match="give noise_multiplier"):
        Ensemble([claimed], toy())


def test_published_noise_under_a_name_of_ones_own_is_not_calibrated_either(monkeypatch):
    """What is calibrated is what members cost, not what their options say."""
    def mine(context):
        return PublishedGReDP(context.noise_multiplier, context.clipping, Fourier(), context.noise)

    monkeypatch.setitem(base._MECHANISMS, "mine", mine)
    config = dataclasses.replace(CONFIG, mechanism="mine", epsilon=1.0, noise_multiplier=None)
    with pytest.raises(ConfigError, match=r"'mine' with σ = .* costs"):
        Ensemble([config], toy())
    sound = dataclasses.replace(config, mechanism="gredp")
    assert Ensemble([sound], toy()).configs[0].noise_multiplier > 0


def test_an_unseeded_ensemble_neither_writes_down_nor_repeats_its_noise():
    """Batches of an unseeded ensemble are new after a restart: the same noise would hide two different sums."""
    config = TrainConfig(model="logistic", epsilon=None, noise_multiplier=1.0, batch=16, steps=4, lr=0.1, seed=None)
    first = Ensemble([config, config])
    state = first.state_dict()
    assert state["noise"] is None
    second = Ensemble([config, config])
    second.load_state_dict(state)
    draws = [torch.empty(100, device=e.device).normal_(generator=e.generator) for e in (first, second)]
    assert not torch.equal(*draws)


def trained_after_fork() -> list[list[float]]:
    """The weights of one unseeded ensemble, trained by both sides of a fork."""
    config = TrainConfig(model="logistic", epsilon=None, noise_multiplier=1e4, batch=16, steps=1, lr=0.1, seed=None, device="cpu")
    ensemble, context = Ensemble([config]), multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def run() -> None:
        ensemble.run()
        answers.put(ensemble.stack.flat.flatten().tolist())

    child = context.Process(target=run)
    child.start()
    run()
    found = [answers.get() for _ in range(2)]
    child.join()
    return found


def test_forked_ensembles_draw_noise_of_their_own():
    """They draw other batches, so that the same noise would hide two different sums."""
    one, other = map(torch.tensor, alone(trained_after_fork))
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.5


def test_members_draw_noise_that_reaches_as_far_as_a_session_s():
    family = Ensemble([dataclasses.replace(CONFIG, data="digits", model="logistic", model_options={})]).family
    drawn = family.noise(torch.empty(2, 40), torch.Generator().manual_seed(3))
    assert torch.equal(drawn, fill_normal(torch.empty(2, 40), torch.Generator().manual_seed(3)))
