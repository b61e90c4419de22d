"""SUR and IS: sensitivity, decisions, both releases on the books; diagnostics and Theorem 1's identity."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.accounting import delta, epsilon, gaussian, poisson
from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.companions import ImportanceSampling, SelectiveUpdate
from erlangen.mechanisms.diagnostics import NON_PRIVATE, efficiency, gradient_error, measure, measure_efficiency
from tests.mechanisms.attacks import attack_importance, attack_selective, exact, sampled
from tests.mechanisms.test_spectral import build

# -- selective update and release -----------------------------------------------------------------------------------


def selective(sigma: float = 1.0, bound: float = 0.5, seed: int | None = 0, **options):
    events = []
    return SelectiveUpdate(100, 20, sigma, events.append, bound, seed=seed, **options), events


def test_decisions_follow_the_clipped_mean():
    judge, _ = selective(0.0, threshold=-0.1)
    zeros = torch.zeros(20)
    assert judge.decide(zeros, zeros - 0.2)
    assert not judge.decide(zeros, zeros - 0.05)
    assert not judge.decide(zeros, zeros + 1.0)
    one_miracle = zeros.clone()
    one_miracle[0] = -1e9  # clipped to −0.5: a mean of −0.025
    assert not judge.decide(zeros, one_miracle)
    assert not judge.decide(torch.zeros(0), torch.zeros(0))  # an empty sample says nothing


def test_a_threshold_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="threshold is NaN"):
        selective(1.0, threshold=math.nan)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, -1e38, 0.1])
def test_no_record_moves_the_sum_by_more_than_the_bound(value):
    """Neighbouring samples through the real code, the noise being the same seeded draw."""
    others = torch.linspace(-1, 1, 9)
    totals = []
    for extra in ([], [value]):
        judge, _ = selective(1.0)
        seen = []
        original = judge.noise.perturb
        judge.noise.perturb = lambda t, std: seen.append((float(t), std)) or original(t, std)  # noqa: B023
        judge.decide(torch.zeros(9 + len(extra)), torch.cat([others, torch.tensor(extra)]))
        totals.append(seen[0])
    assert abs(totals[0][0] - totals[1][0]) <= 0.5
    assert totals[0][1] == 0.5  # σ·bound


def test_every_decision_is_recorded_before_it_is_made():
    judge, events = selective(1.5)
    for k in range(3):
        judge.decide(torch.zeros(5), torch.full((5,), (-1.0) ** k))
    assert events == [poisson(0.2, gaussian(1.5))] * 3
    with pytest.raises(ValueError, match="one per record"):
        judge.decide(torch.zeros(5), torch.zeros(4))
    assert len(events) == 3


def test_the_judges_are_another_poisson_sample():
    judge, _ = selective()
    draws = [judge.batch() for _ in range(200)]
    counts = torch.bincount(torch.cat(draws), minlength=100)
    assert float(counts.double().mean()) == pytest.approx(40, rel=0.1)
    assert len({len(d) for d in draws}) > 5


def test_with_the_engine_both_releases_are_on_the_books_and_rejection_undoes_the_step():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(0, 2, (60,))
    model = nn.Linear(4, 2)
    engine = PrivacyEngine(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=15),
        noise_multiplier=2.0, max_grad_norm=1.0, mechanism="geodp",
    )  # fmt: skip
    judge = SelectiveUpdate(60, 15, 2.0, engine.accountant.record, threshold=-math.inf, seed=3)

    def losses(indices):
        return nn.functional.cross_entropy(module(x[indices]), y[indices], reduction="none")

    start = model.weight.detach().clone()
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(xb), yb).backward()
        assert judge.step(module, optimizer, losses) is False
    assert torch.equal(model.weight.detach(), start)
    step = poisson(0.25, gaussian(2.0))
    assert engine.get_epsilon(1e-5) == pytest.approx(epsilon([(step, 8)], 1e-5), rel=1e-6)
    judge.threshold = math.inf
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(xb), yb).backward()
        assert judge.step(module, optimizer, losses) is True
    assert not torch.equal(model.weight.detach(), start)


def test_selective_state_resumes_exactly():
    first, _ = selective()
    first.batch()
    first.decide(torch.zeros(3), torch.zeros(3))
    again, _ = selective()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(first.batch(), again.batch())
    first.noise.next_release()
    again.noise.next_release()
    assert float(first.noise.perturb(torch.zeros(1), 1.0)) == float(again.noise.perturb(torch.zeros(1), 1.0))


# -- importance sampling --------------------------------------------------------------------------------------------

norms = st.lists(st.floats(0, 1e30) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=20)


@given(norms)
@settings(max_examples=100, deadline=None)
def test_probabilities_are_bounded_and_see_one_record_only(values):
    sampling = ImportanceSampling(0.2, bound=1.5, floor=0.1)
    p = sampling.probabilities(torch.tensor(values))
    assert float(p.max()) <= 0.2
    assert float(p.min()) >= 0.02 - 1e-12
    alone = torch.stack([sampling.probabilities(torch.tensor([v]))[0] for v in values])
    assert torch.equal(p, alone)


def test_the_weighted_batch_is_unbiased():
    sampling = ImportanceSampling(0.3, bound=1.0, seed=0)
    size = torch.rand(400, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for _ in range(400):
        records, weights = sampling.draw(size)
        total += float((weights * size[records]).sum())
    assert total / 400 == pytest.approx(0.3 * float(size.sum()), rel=0.02)


@pytest.mark.parametrize("p", [0.001, 0.01, 0.05])
def test_a_smaller_inclusion_probability_never_costs_more(p):
    """The convexity argument, checked on the accountant: δ(ε) of Poisson(p) ≤ δ(ε) of Poisson(q_max)."""
    for sigma in (0.7, 2.0):
        for eps in (0.1, 0.5, 2.0):
            assert delta(poisson(p, gaussian(sigma)), eps) <= delta(poisson(0.1, gaussian(sigma)), eps) + 1e-12


def test_importance_sampling_events():
    assert ImportanceSampling(0.1, 1.0).event(gaussian(2.0)) == poisson(0.1, gaussian(2.0))
    published = ImportanceSampling(0.1, 1.0, as_published=True)
    assert epsilon(published.event(gaussian(100.0)), 1e-5) == math.inf
    a, b = published.probabilities(torch.tensor([1.0, 1.0])), published.probabilities(torch.tensor([1.0, 9.0]))
    assert float(a[0]) != float(b[0])  # one record's norm moves another's inclusion


def test_importance_sampling_as_published_is_refuted_by_experiment():
    """One long gradient takes everybody else's probability: seen at once, though σ = 8 and q = 0.1 account for ε = 0.042."""
    accounted = sampled(8.0, 0.1)
    assert accounted < 0.1
    assert attack_importance(8.0, 0.1, 1000, 1000) > 3
    assert attack_importance(8.0, 0.1, 1000, 1000, sound=True) < accounted


def test_a_rejection_is_an_answer():
    """Rejected updates that are not paid for: the decisions alone have a lower bound far above 0."""
    assert 0.7 < attack_selective(1.0, 8_000) < exact(1.0)


def test_importance_state_and_secure_draws():
    first, again = (ImportanceSampling(0.5, 1.0, seed=1) for _ in range(2))
    first.draw(torch.ones(50))
    again.load_state_dict(first.state_dict())
    assert torch.equal(first.draw(torch.ones(50))[0], again.draw(torch.ones(50))[0])
    records, weights = ImportanceSampling(1.0, 1.0, secure=True).draw(torch.ones(50))
    assert records.numel() == 50
    assert torch.equal(weights, torch.ones(50))


def test_companion_arguments_are_checked():
    for make, message in (
        (lambda: ImportanceSampling(0.0, 1.0), "max_rate"),
        (lambda: ImportanceSampling(0.5, -1.0), "bound is"),
        (lambda: ImportanceSampling(0.5, 1.0, floor=0.0), "floor is"),
        (lambda: SelectiveUpdate(10, 5, -1.0, print), "noise_multiplier is"),
        (lambda: SelectiveUpdate(10, 5, 1.0, print, bound=math.inf), "bound is"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# -- diagnostics ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.floats(1e-3, 10))
@settings(max_examples=50, deadline=None)
def test_theorem_one_is_an_identity(seed, rate):
    """Items A and B are exactly the difference of squared distances to the optimum."""
    torch.manual_seed(seed)
    w, optimum, clean, noise = torch.randn(4, 30, dtype=torch.float64)
    noisy = clean + 3 * noise
    items = efficiency(w, optimum, clean, noisy, rate)
    direct = (w - rate * noisy - optimum).square().sum() - (w - rate * clean - optimum).square().sum()
    assert items.difference == pytest.approx(float(direct), rel=1e-9, abs=1e-9)
    assert items.non_private
    assert NON_PRIVATE


def test_errors_of_a_known_perturbation():
    true = torch.tensor([3.0, 4.0])
    assert gradient_error(2 * true, true).direction_mse == pytest.approx(0.0, abs=1e-12)
    assert gradient_error(2 * true, true).magnitude_mse == pytest.approx(25.0)
    opposite = gradient_error(torch.stack([true, -true]), true)
    assert opposite.cosine == pytest.approx(0.0)
    assert opposite.direction_mse == pytest.approx(math.pi**2 / 2, rel=1e-6)
    assert opposite.gradient_mse == pytest.approx(50.0)
    assert opposite.non_private


def test_any_mechanism_can_be_measured():
    g = {"w": torch.randn(200, 40) * 0.1 + torch.ones(40)}
    true = {"w": g["w"].mean(0)}
    each = {"iso": GaussianMechanism(1.0, 1.0), "geodp": build("geodp", 1.0), "gredp": build("gredp", 1.0)}
    found = {name: measure(mechanism, g, true, 200.0, repeats=5) for name, mechanism in each.items()}
    assert all(0.99 < error.cosine <= 1 for error in found.values())
    assert found["geodp"].gradient_mse > 0


@pytest.mark.parametrize("name", ["iso", "geodp", "gredp", "spectral"])
def test_items_of_any_mechanism(name):
    """Without noise and clipping item A and B vanish; with noise A is the noise's energy and B averages out."""
    torch.manual_seed(0)
    g = {"w": torch.randn(50, 20) * 0.01 + 0.02}
    w, optimum, clean = {"w": torch.zeros(20)}, {"w": torch.ones(20)}, {"w": g["w"].mean(0)}
    if name != "geodp":
        quiet = measure_efficiency(build(name, 0.0), g, w, optimum, clean, 0.5, 50.0)
        assert abs(quiet.item_a) + abs(quiet.item_b) < 1e-6
    noisy = measure_efficiency(build(name, 5.0), g, w, optimum, clean, 0.5, 50.0, repeats=400)
    assert noisy.non_private
    if name in ("iso", "gredp", "spectral"):
        assert noisy.item_a == pytest.approx(0.25 * 20 * (5.0 / 50) ** 2, rel=0.15)
        assert abs(noisy.item_b) < 4 * 2 * 0.5 * 0.1 * math.sqrt(20 / 400)
