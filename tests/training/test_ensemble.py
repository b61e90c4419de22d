"""Many runs at once are the runs they stand for: same weights without noise, same distribution with it, same cost."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from erlangen.circulant import CirculantConv2d, CirculantLinear
from erlangen.data.base import Dataset
from erlangen.equivariant import (
    EquivariantGroupNorm,
    EquivariantSequential,
    FourierNonlinearity,
    NormNonlinearity,
    SteerableConv2d,
    cyclic,
    dihedral,
    fields,
    regular_fields,
    so2,
    spectral,
    trivial_fields,
)
from erlangen.models import register_model
from erlangen.streams import Stream, fill_normal
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.padding import PaddedBatches, PoissonProcess, physical_size
from erlangen.training.session import Session
from erlangen.training.stacked import Stack
from tests.alone import alone
from tests.gradients.reference import one_by_one
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


def build(name: str) -> tuple[nn.Module, int]:
    c4, d4 = cyclic(4), dihedral(4)
    band = fields(spectral(so2(), 1), 2)
    made = {
        "plain": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False),
            nn.Flatten(), nn.Linear(27, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False),
        ),
        "circulant": lambda: nn.Sequential(
            CirculantConv2d(2, 5, 3, block_size=3, padding=1), nn.ReLU(),
            CirculantConv2d(5, 4, 3, block_size=2, stride=2, bias=False),
            nn.Flatten(), CirculantLinear(36, 10, 4), nn.ReLU(), CirculantLinear(10, 3, 3, bias=False),
        ),
        "grouped": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, padding=1), nn.PReLU(), nn.Flatten(), nn.Linear(256, 3)),
        "standardised": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(d4, 2), regular_fields(d4, 2), 3, standardise=True, padding=1),
            EquivariantGroupNorm(regular_fields(d4, 2), 1),
            SteerableConv2d(regular_fields(d4, 2), regular_fields(d4, 1), 3, basis="pixel", standardise=True),
        ),
        "per element": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(c4, 2), regular_fields(c4, 2), 5, stride=2, bias=False),
            EquivariantGroupNorm(regular_fields(c4, 2), per_element=True),
        ),
        "SO(2)": lambda: EquivariantSequential(
            SteerableConv2d(trivial_fields(so2(), 2), band, 3, padding=1),
            FourierNonlinearity(so2(), 1, 2, nn.Mish()),
            NormNonlinearity(band),
        ),
    }[name]()  # fmt: skip
    return (
        made
        if isinstance(made, nn.Sequential) and name in ("plain", "grouped", "circulant")
        else nn.Sequential(made, _Head())
    ), 2


class _Head(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


def cross_entropy_of(labels):
    rows = iter(labels)
    return lambda out: nn.functional.cross_entropy(out, next(rows).view(1), reduction="none")


@pytest.mark.parametrize("name", ["plain", "grouped", "standardised", "per element", "SO(2)", "circulant"])
def test_every_row_has_the_gradient_of_its_own_model(name):
    torch.manual_seed(0)
    models = [build(name)[0].double() for _ in range(3)]
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    x, y = torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    stack = Stack(models, 2)
    gradients = stack.dense(stack.backward(stack(x), y))
    for k, model in enumerate(models):
        rows = slice(2 * k, 2 * k + 2)
        torch.testing.assert_close(stack(x)[rows], model(x[rows]), rtol=1e-8, atol=1e-10)
        want = one_by_one(model, (x[rows],), cross_entropy_of(y[rows]))
        flat = torch.cat([want[n].flatten(1) for n in stack.shapes], 1)
        assert (gradients[k] - flat).norm() / flat.norm() < 1e-5  # the loss is taken in single precision


def test_frozen_parameters_stay_and_have_no_gradient():
    torch.manual_seed(0)
    models = [build("plain")[0] for _ in range(2)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        model[1].weight.fill_(2.0)
    stack = Stack(models, 3)
    assert not any(name.startswith(("0.", "1.")) for name in stack.shapes)
    x = torch.randn(6, 2, 8, 8)
    torch.testing.assert_close(stack(x)[:3], models[0](x[:3]), rtol=1e-4, atol=1e-5)


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
        ({"clipping": "per-layer"}, "flat"), ({"mechanism": "geodp", "mechanism_options": {"form": "angles"}}, "family"),
        ({"selective": True}, "selective"), ({"sampling": "importance"}, "sampling"), ({"warm_up": 3}, "warm_up"),
    ],
)  # fmt: skip
def test_what_an_ensemble_cannot_do_is_refused(change, what):
    with pytest.raises(ConfigError, match=what):
        Ensemble([dataclasses.replace(CONFIG, **change)], toy())


def test_members_that_differ_in_shape_are_refused():
    with pytest.raises(ConfigError, match="batch is 8"):
        Ensemble([CONFIG, dataclasses.replace(CONFIG, batch=8)], toy())
    with pytest.raises(ConfigError, match="at least one"):
        Ensemble([], toy())


# -- batches ------------------------------------------------------------------------------------------------------


def test_the_process_is_poisson_sampling():
    """Sizes, inclusion rates and independence of records and steps, against N independent trials."""
    records, batch, steps = 50, 7, 6400
    drawn = PoissonProcess(records, batch, Stream("t", 1)).draw(steps)
    hits = np.zeros((steps, records))
    for k, indices in enumerate(drawn):
        assert len(np.unique(indices)) == len(indices)
        hits[k, indices] = 1
    q = batch / records
    error = math.sqrt(q * (1 - q) / steps)
    assert np.abs(hits.mean(0) - q).max() < 4.5 * error
    assert abs(hits.sum(1).var() / (records * q * (1 - q)) - 1) < 0.08
    centred = (hits - q) / math.sqrt(q * (1 - q))
    across = centred.T @ centred / steps - np.eye(records)
    assert np.abs(across).max() < 5 / math.sqrt(steps)
    lag = (centred[:-1, -1] * centred[1:, 0]).mean()
    assert abs(lag) < 4.5 / math.sqrt(steps), "the end of a step leaks into the next"


def test_full_batches_hold_everyone():
    assert all(len(b) == 9 for b in PoissonProcess(9, 9, Stream("t", 1)).draw(3))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 23), min_size=4, max_size=4), min_size=1, max_size=4), rows=st.integers(1, 9)
)
def test_tables_hold_every_record_once(sizes, rows):
    rng = np.random.default_rng(0)
    batches = [[rng.permutation(1000)[:n] for n in member] for member in sizes]
    table, passes = PaddedBatches([lambda n, m=m: m for m in batches], rows).draw(4)
    assert table.shape == (passes.sum(), len(sizes), rows)
    ends = np.cumsum(passes)
    for step in range(4):
        part = table[ends[step] - passes[step] : ends[step]]
        assert passes[step] == max(1, max(-(-member[step] // rows) for member in sizes))
        for k, member in enumerate(batches):
            held = part[:, k].reshape(-1)
            assert sorted(held[held >= 0]) == sorted(member[step])


def test_the_static_size_balances_padding_and_second_passes():
    assert physical_size(60_000, 64, 1) < physical_size(60_000, 64, 60) <= 112
    assert physical_size(50, 50, 3) == 50
    assert physical_size(60_000, 1, 20) % 8 == 0


# -- families -----------------------------------------------------------------------------------------------------

FAMILIES = {
    "spectral beside iso": [
        {"mechanism": "spectral", "mechanism_options": {"ratio": 0.4}}, {"momentum": 0.0},
        {"mechanism": "spectral", "mechanism_options": {"as_published": True}},
    ],
    "gredp": [{"mechanism": "gredp"}, {"mechanism": "gredp", "mechanism_options": {"as_published": "complex"}}],
    "auto-s": [{"clipping": "auto-s"}, {"clipping": "auto-s", "max_grad_norm": 0.2, "mechanism": "rep"}],
    "psac": [{"clipping": "psac"}],
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
        if change["mechanism"] == "geodp":  # the query before post-processing
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


def batches_after_fork() -> list[list[int]]:
    """The next batch of a process of draws that both sides of a fork hold, in the middle of a block."""
    process, context = PoissonProcess(400, 200, Stream("sampling")), multiprocessing.get_context("fork")
    process.draw(3)
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(process.draw(1)[0].tolist()))
    child.start()
    found = [answers.get(), process.draw(1)[0].tolist()]
    child.join()
    return found


def test_forks_and_copies_draw_batches_of_their_own_in_the_middle_of_a_block():
    """Two releases on one draw cost more than two on a draw each, which is what both sides account."""
    one, other = alone(batches_after_fork)
    assert one != other
    for seed, same in ((None, False), (3, True)):
        process = PoissonProcess(400, 200, Stream("sampling", seed))
        process.draw(3)
        assert np.array_equal(copy.deepcopy(process).draw(1)[0], process.draw(1)[0]) is same


def test_members_draw_noise_that_reaches_as_far_as_a_session_s():
    family = Ensemble([dataclasses.replace(CONFIG, data="digits", model="logistic", model_options={})]).family
    drawn = family.noise(torch.empty(2, 40), torch.Generator().manual_seed(3))
    assert torch.equal(drawn, fill_normal(torch.empty(2, 40), torch.Generator().manual_seed(3)))
