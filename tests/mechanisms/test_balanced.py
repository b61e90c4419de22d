"""The metric with the least noise: optimal among diagonals, independent of weights and records, at ISO's price."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import erlangen
from erlangen.data import load
from erlangen.mechanisms import Context, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.balanced import balanced_scales, fresh, with_equal_signal
from erlangen.mechanisms.rep import aligned_metric, structural_metric
from erlangen.models import make_model
from erlangen.training import TrainConfig
from erlangen.training.ensemble import Ensemble
from erlangen.training.session import Session

SHAPE = (1, 8, 8)


def net() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3), nn.Mish(), nn.GroupNorm(2, 4), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(144, 20), nn.Tanh(), nn.Linear(20, 10))


def balanced(module: nn.Module, **options) -> dict[str, torch.Tensor]:
    return aligned_metric(module, {"metric": "balanced", **options}, SHAPE)[0]


def noise_beside_signal(m: torch.Tensor, squares: torch.Tensor) -> float:
    return float(m.square().sum() * (squares / m.square()).sum())


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12), st.integers(0, 99))
def test_the_root_is_the_best_diagonal_and_whitening_gains_nothing(scales, seed):
    s = torch.tensor(scales, dtype=torch.float64)
    other = torch.randn(len(s), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp()
    best, squares = noise_beside_signal(s.sqrt(), s.square()), s.square()
    assert best == pytest.approx(float(s.sum()) ** 2)
    assert best <= noise_beside_signal(other, squares) * (1 + 1e-12)
    assert noise_beside_signal(s, squares) == pytest.approx(noise_beside_signal(torch.ones_like(s), squares))


@given(st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=8), st.floats(-1, 2))
def test_at_the_same_bound_gradients_are_shortened_alike(scales, power):
    given = {str(k): torch.full((k + 1,), scale, dtype=torch.float64) for k, scale in enumerate(scales)}
    metric = with_equal_signal(given, power)
    squares = torch.cat([t**4 for t in given.values()])
    m = torch.cat(list(metric.values()))
    assert float((squares / m.square()).sum()) == pytest.approx(float(squares.sum()))
    if power == 1:
        assert float(m.square().sum()) <= m.numel() * (1 + 1e-9)


@pytest.mark.parametrize(("model", "options"), [("c8-tiny", {}), ("mlp", {})])
def test_real_gradients_get_less_noise_for_the_same_signal(model, options):
    data = load("rotated_digits")
    torch.manual_seed(1)
    module = make_model(model, data.input_shape, data.classes, **options)
    metric, facts = aligned_metric(module, {"metric": "balanced"}, data.input_shape)
    assert facts == {"metric": "balanced", "power": 1.0}
    m = torch.cat([metric[name].flatten() for name, _ in module.named_parameters()])
    x, y = torch.as_tensor(data.x_train[:64]), torch.as_tensor(data.y_train[:64])
    rows = []
    for k in range(64):
        loss = nn.functional.cross_entropy(module(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    squares = torch.stack(rows).square().mean(0)
    assert noise_beside_signal(m, squares) < 0.85 * noise_beside_signal(torch.ones_like(m), squares)
    assert float((squares / m.square()).sum() / squares.sum()) == pytest.approx(1.0, rel=0.35), "C means what it means in ISO"


class KeepsItsWeights(nn.Linear):
    """The twin: a layer that says it starts anew, and does not."""

    def reset_parameters(self) -> None:
        if not hasattr(self, "started"):
            self.started = True
            super().reset_parameters()


@pytest.mark.parametrize("make", [
    net, lambda: make_model("c8-tiny", SHAPE, 10), lambda: nn.Sequential(nn.Flatten(), KeepsItsWeights(64, 10)),
    lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 10))), lambda: make_model("mlp", SHAPE, 10),
])  # fmt: skip
def test_neither_weights_nor_their_history_take_part(make):
    module = make()
    before = balanced(module)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(100 * torch.randn(p.shape))
    after = balanced(module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(bool(p.isfinite().all()) for p in fresh(module, structural_metric(module)).parameters())


def test_the_network_and_the_generator_are_left_alone():
    module = net()
    state, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    balanced(module)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert module.training
    assert all(p.grad is None for p in module.parameters())


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1) * self.seen)


@pytest.mark.parametrize(("module", "shape", "said"), [
    (net, None, "the shape of one record"), (net, 8, "input_shape is 8"), (net, (3, 8, 8), r"made-up inputs of shape \(3, 8, 8\)"),
    (Remembers, SHAPE, "buffer 'seen'"), (lambda: nn.Sequential(nn.Embedding(5, 3)), (4,), "made-up inputs"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_with_the_cure(module, shape, said):
    with pytest.raises(ValueError, match=said):
        aligned_metric(module(), {"metric": "balanced"}, shape)


def test_an_exponent_must_be_finite():
    with pytest.raises(ValueError, match="power is inf"):
        balanced(net(), power=float("inf"))


def test_a_parameter_that_gets_no_gradient_does_not_lose_its_noise():
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.Flatten(), nn.Linear(144, 10))  # the first bias has none
    scales = balanced_scales(module, SHAPE, structural_metric(module))
    entries = torch.cat([t.flatten() for t in scales.values()])
    assert float(scales["0.bias"][0]) == float(entries.min())
    assert float(entries.min()) > 0.05 * float((entries**4).mean() ** 0.25)


def test_it_costs_what_iso_costs_and_adds_what_it_states():
    module = net()
    context = Context(2.0, make_clipping("flat", 0.5), StreamNoise(0), module, 4.0, {"metric": "balanced"}, SHAPE)
    mechanism, iso = make_mechanism("rep", context), make_mechanism("iso", replace(context, options={}))
    assert mechanism.event() == iso.event()
    parameters = dict(module.named_parameters())
    mechanism.bind(parameters, 4.0)
    nobody = {name: torch.zeros(0, *p.shape) for name, p in parameters.items()}
    drawn = [mechanism.release(nobody) for _ in range(200)]
    for name, m in balanced(module).items():
        spread = 4.0 * torch.stack([release[name] for release in drawn]).square().mean().sqrt()
        assert float(spread) == pytest.approx(2.0 * 0.5 * float(m.flatten()[0]), rel=0.2)
    assert sum(float(m.square().sum()) for m in balanced(module).values()) < sum(p.numel() for p in parameters.values())


CONFIG = TrainConfig(
    data="rotated_digits", model="c8-tiny", mechanism="rep", mechanism_options={"metric": "balanced"}, epsilon=None,
    noise_multiplier=1.0, batch=64, steps=2, seed=0, momentum=0.0, ema=0.0,
)  # fmt: skip


def test_sessions_ensembles_and_engines_take_it():
    data = load("rotated_digits")
    session, ensemble = Session(CONFIG, data), Ensemble([CONFIG], data)
    session.step()
    ensemble.run(1)
    stated = torch.cat([torch.as_tensor(m).flatten() for m in session.training.mechanism.geometry.m.values()])
    assert torch.allclose(ensemble.metric[0].cpu(), stated)
    module, x = net(), torch.randn(32, *SHAPE)
    engine, optimizer = erlangen.PrivacyEngine(seed=0), torch.optim.SGD(module.parameters(), 0.1)
    _, _, batches = engine.make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, torch.zeros(32).long()), 8),
        noise_multiplier=1.0, max_grad_norm=1.0, mechanism="rep", mechanism_options={"metric": "balanced", "input_shape": SHAPE},
    )  # fmt: skip
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in module.parameters())
