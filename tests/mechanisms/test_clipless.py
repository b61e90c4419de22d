"""Clipless through the engine and alone: sums against one-by-one gradients, splits, rows, hostile records, refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine, RowMap
from erlangen.accounting import Accountant, composed, epsilon, gaussian, poisson
from erlangen.gradients.tape import Tape
from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    BackwardClip,
    BoundedInput,
    CrossEntropy,
    Flatten,
    Householder,
    LipschitzLayer,
    MaxMin,
    MulticlassHinge,
    Projector,
    Residual,
    SensitivityError,
    Sequential,
    SpectralConv2d,
    SpectralDense,
    backpropagate_bounds,
    check_layer,
    output,
)
from erlangen.mechanisms import Clipless, Context, StreamNoise, make_clipping, make_mechanism
from erlangen.mechanisms.clipless import noise_split
from tests.gradients.reference import one_by_one

LOSS = CrossEntropy(4.0)
SHAPE, CLASSES = (1, 6, 6), 3


def network(*extra, seed: int = 0) -> Sequential:
    torch.manual_seed(seed)
    net = Sequential(
        BoundedInput(SHAPE, 2.0), SpectralConv2d(1, 4, 3, bias=True, bias_bound=0.1), MaxMin(), Householder(4),
        Residual(SpectralConv2d(4, 4, 1), MaxMin()), Flatten(), SpectralDense(144, CLASSES, bias=True), *extra,
    )  # fmt: skip
    with torch.no_grad():
        net[1].weight.add_(0.05 * torch.randn_like(net[1].weight))
    output(net)
    Projector(net)()
    return net


def batch(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *SHAPE, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def mechanism(net, sigma: float = 0.0, loss=LOSS, **options) -> Clipless:
    built = Clipless(sigma, net, loss, noise=StreamNoise(0), **options)
    built.bind(dict(net.named_parameters()))
    return built


def summed(net, x, y, loss=LOSS, rows=None, reduction="mean", backstop=False):
    """What reaches the mechanism from one backward pass."""
    built = mechanism(net, loss=loss, backstop=backstop)
    recorder = built.recorder(Tape(dict(net.named_parameters()), reduction))
    recorder.attach(net)
    try:
        recorder.rows = rows
        loss(net(x), y).backward()
        built.accumulate(recorder.gradients())
    finally:
        recorder.detach(net)
    return built.finish(1.0), built


def reference(net, x, y, loss=LOSS):
    """[rows, *shape] gradients of each record's own loss."""
    grads = [one_by_one(net, (x[i : i + 1],), lambda out, i=i: loss(out, y[i : i + 1])) for i in range(len(x))]
    return {n: torch.cat([g[n] for g in grads]) for n in grads[0]}


def assert_close(got, want):
    for name, w in want.items():
        assert torch.allclose(got[name], w, rtol=1e-4, atol=1e-5), name


# -- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backstop", [False, True])
@pytest.mark.parametrize("extra", [(), (BackwardClip(0.3),)], ids=["plain", "clipped"])
def test_one_backward_pass_is_the_sum_over_records(extra, backstop):
    net = network(*copy.deepcopy(extra))
    x, y = batch(5)
    want = {n: g.sum(0) for n, g in reference(net, x, y).items()}
    got, built = summed(net, x, y, backstop=backstop)
    assert_close(got, want)
    assert built.backstop_hits == 0


@pytest.mark.parametrize("backstop", [False, True])
def test_views_groups_and_padding_are_means_over_the_owners_rows(backstop):
    net = network(BackwardClip(0.3))
    x, y = batch(6)
    g = reference(net, x, y)
    views = {n: v.view(3, 2, *v.shape[1:]).mean(1) for n, v in g.items()}
    got, _ = summed(net, x, y, rows=RowMap.regular(3, 2, valid=torch.tensor([True, False, True])), backstop=backstop)
    assert_close(got, {n: v[0] + v[2] for n, v in views.items()})
    owner = torch.tensor([4, 4, 4, 7, -1, 9])
    got, _ = summed(net, x, y, rows=RowMap.of(owner), backstop=backstop)
    assert_close(got, {n: v[:3].mean(0) + v[3] + v[5] for n, v in g.items()})
    with pytest.raises(ValueError, match="no bound that is known"):
        summed(net, x, y, rows=RowMap.of(owner, reduce="sum"))


def test_every_record_stays_within_the_bounds_whatever_the_loss_in_the_loop():
    """A training loop that uses another loss than it declared is cut at the gate."""
    net, (x, y) = network(), batch(4)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    (1e6 * nn.functional.cross_entropy(net(x), y)).backward()
    sums = recorder.gradients().sums
    bounds = backpropagate_bounds(net, built.loss_constant)
    assert all(float(g.norm()) <= 4 * bounds[n] for n, g in sums.items())
    assert any(float(g.norm()) > 0.01 * bounds[n] for n, g in sums.items())
    recorder.detach(net)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_moves_the_sum_by_no_more_than_its_bound(value):
    net, (x, y) = network(), batch(4)
    clean, _ = summed(net, x[:3], y[:3])
    x[3] = value
    dirty, built = summed(net, x, y)
    for name, g in dirty.items():
        assert float((g - clean[name]).norm()) <= built.bounds[name]


def test_cotangents_that_are_not_finite_contribute_nothing():
    net, (x, y) = network(), batch(4)

    class Broken(CrossEntropy):
        def forward(self, logits, target):
            scale = torch.ones(len(logits), 1)
            scale[-1] = math.nan
            return super().forward(logits * scale, target)

    clean, _ = summed(net, x[:3], y[:3])
    dirty, _ = summed(net, x, y, loss=Broken(4.0))
    assert_close(dirty, clean)


def test_an_empty_batch_is_noise_alone():
    net, (x, y) = network(), batch(4)
    for loss in (LOSS, MulticlassHinge()):
        got, _ = summed(net, x[:0], y[:0], loss=loss)
        assert all(float(g.abs().max()) == 0.0 for g in got.values())


def test_gradients_from_outside_the_gate_never_enter_the_release():
    net, (x, y) = network(), batch(4)
    want, _ = summed(net, x, y)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    leak = 100 * nn.functional.linear(x.flatten(1), net[6].weight[:, :36]).sum()
    (LOSS(net(x), y) + leak).backward()
    built.accumulate(recorder.gradients())
    assert_close(built.finish(1.0), want)
    recorder.detach(net)


def test_a_record_contributes_once_per_step():
    net, (x, y) = network(), batch(4)
    recorder = mechanism(net).recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with pytest.raises(RuntimeError, match="two forward passes"):
        (LOSS(net(x), y) + LOSS(net(x), y)).backward()
    recorder.clear()
    LOSS(net(x), y).backward()
    with pytest.raises(RuntimeError):
        LOSS(net(x), y).backward()
    recorder.detach(net)


# -- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["global", "local", "optimal"])
def test_every_split_is_one_gaussian_of_multiplier_sigma(split):
    built = mechanism(network(), 1.7, split=split)
    squares = sum((built.bounds[n] / s) ** 2 for n, s in built.stds().items())
    assert squares**-0.5 == pytest.approx(1.7)
    assert built.event() == GaussianDpEvent(1.7)
    assert built.event(0.0) == NonPrivateDpEvent()


def test_the_optimal_split_has_the_least_noise_energy():
    bounds = mechanism(network()).bounds
    sizes = {row.name: row.size for row in bounds.rows}

    def energy(stds):
        return sum(sizes[n] * s**2 for n, s in stds.items())

    best = noise_split(bounds, 1.0, "optimal")
    assert energy(best) < min(energy(noise_split(bounds, 1.0, k)) for k in ("global", "local"))
    for name in best:  # no direction improves it
        for factor in (0.97, 1.03):
            other = best | {name: best[name] * factor}
            sigma = sum((bounds[n] / s) ** 2 for n, s in other.items()) ** -0.5
            assert energy({n: s / sigma for n, s in other.items()}) > energy(best)


def test_released_noise_has_the_covariance_it_says():
    net = network()
    built = mechanism(net, 0.8)
    draws = torch.stack([built.finish(1.0)["6.bias"] for _ in range(4000)]).double()
    found = draws.T @ draws / len(draws)
    expected = built.covariance("6.bias")
    assert torch.allclose(found, expected, atol=0.12 * float(expected[0, 0]))
    assert float(torch.linalg.eigvalsh(found)[0]) > 0.85 * float(expected[0, 0])


def test_release_alone_cuts_what_exceeds_the_bounds_and_counts_it():
    net = network()
    built = mechanism(net)
    for value in (1e30, math.nan, math.inf, 1e-30, 1.0):
        gradients = {n: torch.full((1, *p.shape), value) for n, p in net.named_parameters()}
        released = built.release(gradients, 1.0)
        assert all(float(g.double().norm()) <= built.bounds[n] for n, g in released.items())
    assert built.backstop_hits >= 3


# -- the engine ------------------------------------------------------------------------------------------------------


def private(net, data=None, sigma=1.0, batch_size=8, lr=0.05, seed=0, loss=LOSS, **options):
    data = TensorDataset(*batch(40)) if data is None else data
    engine = PrivacyEngine(seed=seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    options = {"mechanism": "clipless", "criterion": loss, "noise_multiplier": sigma, **options}
    return engine, *engine.make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch_size), **options
    )


def run(model, optimizer, loader, loss=LOSS, steps=None):
    done = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        done += 1
        if steps is not None and done == steps:
            break
    return done


def test_engine_steps_project_and_account():
    net = network()
    engine, model, optimizer, loader = private(net, lr=50.0)
    assert isinstance(engine.event(), PoissonSampledDpEvent)
    run(model, optimizer, loader, steps=3)
    assert all(float(m.certified_norm()) <= m.lipschitz * 1.0001 for m in net.modules() if hasattr(m, "certified_norm"))
    # what was spent is what was released: three steps, in the middle of an epoch
    assert engine.get_epsilon(1e-5) == pytest.approx(epsilon(composed(poisson(8 / 40, gaussian(1.0)), 3), 1e-5))
    engine.remove()
    assert "forward" not in net.__dict__


def test_no_per_sample_gradient_is_computed(monkeypatch):
    """Neither the tape's rules nor its pieces are touched."""
    from erlangen.gradients import pieces

    def refuse(*args, **kwargs):
        raise AssertionError("a per-sample piece was made")

    for kind in (pieces.Dense, pieces.Outer):
        monkeypatch.setattr(kind, "__init__", refuse)
    engine, model, optimizer, loader = private(network())
    run(model, optimizer, loader)
    assert engine.accountant.steps == 5


def test_without_poisson_sampling_nothing_is_amplified():
    engine, *_ = private(network(), poisson_sampling=False)
    assert engine.event() == GaussianDpEvent(1.0)


def test_replacing_a_record_costs_twice_the_sensitivity():
    replace, half = Accountant("replace-one"), Accountant()
    replace.record(mechanism(network(), 2.0).event())
    half.record(gaussian(1.0))
    assert replace.epsilon(1e-5) == pytest.approx(half.epsilon(1e-5))


def test_physical_batches_do_not_change_the_result():
    weights = []
    for limit in (None, 3):
        net = network()
        _, model, optimizer, loader = private(net, max_physical_batch=limit)
        run(model, optimizer, loader)
        weights.append({n: p.detach().clone() for n, p in net.named_parameters()})
    assert_close(*weights)


def test_the_backstop_never_acts_and_changes_nothing():
    weights = []
    for backstop in (False, True):
        net = network()
        engine, model, optimizer, loader = private(net, mechanism_options={"backstop": backstop})
        run(model, optimizer, loader)
        assert engine.training.mechanism.backstop_hits == 0
        weights.append({n: p.detach().clone() for n, p in net.named_parameters()})
    assert_close(*weights)


def test_weights_written_from_outside_are_projected_before_use():
    net = network()
    _, model, _, _ = private(net)
    model.load_state_dict({n: 10 * v for n, v in model.state_dict().items()})
    model(batch(2)[0])
    assert float(net[6].certified_norm()) <= 1.0001


def test_calibration_and_a_resumed_run():
    net = network(AdaptiveBackwardClip(0.5))
    engine = PrivacyEngine(seed=0)
    engine.make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), 0.05), target_epsilon=2.0, target_delta=1e-5, epochs=2,
        data_loader=DataLoader(TensorDataset(*batch(40)), batch_size=8), mechanism="clipless", criterion=LOSS,
    )  # fmt: skip
    built = engine.training.mechanism
    run(net, engine.training.optimizer, engine.training.loader)
    run(net, engine.training.optimizer, engine.training.loader)
    assert engine.get_epsilon(1e-5) <= 2.0
    other = mechanism(network(AdaptiveBackwardClip(0.5)), built.noise_multiplier)
    other.load_state_dict(built.state_dict())
    assert other.adaptive[0].bound == built.adaptive[0].bound != 0.5
    assert other.describe()["guarantee"] == "sound"


def test_adaptive_clipping_is_paid_for():
    clip = AdaptiveBackwardClip(0.5, count_std=2.0)
    built = mechanism(network(clip), 1.5)
    gradient = sum((built.bounds[n] / s) ** 2 for n, s in built.stds().items())
    assert (gradient + (0.5 / 2.0) ** 2) ** -0.5 == pytest.approx(1.5)
    assert built.event() == GaussianDpEvent(1.5)
    before = built.bounds.total
    clip.total = 100.0
    built.finish(8.0)
    assert clip.bound != 0.5
    assert built.bounds.total != before
    with pytest.raises(ValueError, match="count_std"):
        mechanism(network(AdaptiveBackwardClip(0.5, count_std=0.1)), 1.5)


def test_the_count_of_an_owner_moves_by_at_most_a_half():
    clip = AdaptiveBackwardClip(1e-9)
    net = network(clip)
    x, y = batch(6)
    for rows, owners in ((None, 6), (RowMap.regular(2, 3), 2), (RowMap.of(torch.tensor([0, 0, 0, 0, 1, -1])), 2)):
        built = mechanism(net)
        recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
        recorder.attach(net)
        recorder.rows = rows
        LOSS(net(x), y).backward()
        recorder.clear()  # a pass that is thrown away is not counted
        recorder.rows = rows
        LOSS(net(x), y).backward()
        assert clip.total == 0.0
        recorder.gradients()
        recorder.detach(net)
        assert clip.total == pytest.approx(-0.5 * owners)


class Gains(LipschitzLayer):
    """A user's layer: y_j = s_j·x_j with |s_j| ≤ 1. The three methods, and the projection that they rely on."""

    def __init__(self, features):
        super().__init__()
        self.gains = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.gains

    def propagate_input(self, x):
        return x

    def backpropagate_cotangent(self, x, g):
        return g

    def parameter_bound(self, x, g):
        return {"gains": g * x.norm}

    def project(self):
        self.gains.detach().clamp_(-1.0, 1.0)


class HopefulGains(Gains):
    def parameter_bound(self, x, g):
        return {"gains": 0.5 * g * x.norm}


def test_a_layer_of_three_methods_is_checked_and_trained():
    assert check_layer(Gains(6), (6,), 2.0, 1.5).worst >= 0.9
    with pytest.raises(SensitivityError, match="gains"):
        check_layer(HopefulGains(6), (6,), 2.0, 1.5)
    net = network(Gains(3))
    engine, model, optimizer, loader = private(net, mechanism_options={"backstop": True})
    run(model, optimizer, loader)
    assert engine.training.mechanism.backstop_hits == 0
    gains = dict(net.named_parameters())[next(n for n in engine.training.mechanism.bounds if n.endswith("gains"))]
    assert float(gains.detach().abs().max()) <= 1.0
    assert not torch.equal(gains.detach(), torch.ones(3))


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_bounded_is_refused():
    data = TensorDataset(*batch(40))
    with pytest.raises(TypeError, match="needs a Lipschitz network"):
        private(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), data)
    with pytest.raises(ValueError, match="Lipschitz constant"):
        private(network(), data, loss=None)
    with pytest.raises(ValueError, match="no declared Lipschitz constant"):
        private(network(), data, loss=nn.MSELoss())
    with pytest.raises(ValueError, match="does not know"):
        private(network(), data, mechanism_options={"clip": 1.0})
    with pytest.raises(ValueError, match="split"):
        mechanism(network(), split="fair")
    with pytest.raises(TypeError, match="float32"):
        mechanism(network().bfloat16())


def test_a_lower_precision_than_certified_is_refused():
    net, (x, y) = network(), batch(2)
    built = mechanism(net)
    recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="certified for fp32"):
        net(x)
    recorder.detach(net)
    low = mechanism(net, precision="bf16")
    assert low.sensitivity > built.sensitivity
    recorder = low.recorder(Tape(dict(net.named_parameters()), "mean"))
    recorder.attach(net)
    with torch.autocast("cpu", torch.bfloat16):
        LOSS(net(x), y).backward()
    assert recorder.gradients().owners == 2
    recorder.detach(net)


@pytest.mark.parametrize("mode", ["pieces", "autograd"])
def test_low_precision_sums_over_the_batch_stay_in_float32(mode):
    """One record more adds its own gradient, not a new rounding of the whole sum, which autograd under autocast does."""
    net, x, labels = network(), batch(257)[0], torch.zeros(257, dtype=torch.long)
    built, total = mechanism(net, precision="bf16"), CrossEntropy(4.0, reduction="sum")
    sums = []
    for n in (256, 257):
        recorder = built.recorder(Tape(dict(net.named_parameters()), "sum"))
        assert recorder.mode == "pieces"
        recorder.mode = mode
        recorder.attach(net)
        with torch.autocast("cpu", torch.bfloat16):
            total(net(x[:n]), labels[:n]).backward()
        with torch.no_grad():
            sums.append(recorder.gradients().sums)
        recorder.detach(net)
    with torch.autocast("cpu", torch.bfloat16):
        alone = reference(net, x[256:], labels[256:])
    off = {name: float((sums[1][name] - sums[0][name] - g[0]).norm() / g[0].norm()) for name, g in alone.items()}
    assert (max(off.values()) < 0.02) == (mode == "pieces"), off


def test_a_forward_pass_between_forward_and_backward_does_no_harm():
    for backstop in (False, True):
        net, (x, y) = network(BackwardClip(0.3)), batch(4)
        want, _ = summed(net, x, y)
        built = mechanism(net, backstop=backstop)
        recorder = built.recorder(Tape(dict(net.named_parameters()), "mean"))
        recorder.attach(net)
        loss = LOSS(net(x), y)
        net(x)
        loss.backward()
        built.accumulate(recorder.gradients())
        assert_close(built.finish(1.0), want)
        recorder.detach(net)


def test_by_name_from_a_context():
    options = {"loss": "hinge", "split": "local"}
    context = Context(1.0, make_clipping("flat", 1.0), StreamNoise(0), network(), 8.0, options)
    built = make_mechanism("clipless", context)
    assert isinstance(built, Clipless)
    assert built.loss_constant == pytest.approx(math.sqrt(2))


def test_the_defaults_of_training_suit_lipschitz_networks():
    from erlangen.training.config import TrainConfig
    from erlangen.training.run import train

    summary = train(TrainConfig(mechanism="clipless", epsilon=3.0, seed=0, evaluations=1)).summary
    assert summary["test"]["test_accuracy"] >= 0.88
    assert summary["guarantee"]["epsilon"]["pld"] <= 3.0


def test_sums_and_noise_are_one_vector_in_the_order_of_the_parameters():
    net = network()
    built = mechanism(net, 0.0)
    gradients = {n: 1e-3 * torch.randn(3, *p.shape) for n, p in net.named_parameters()}
    assert_close(built.release(gradients, 1.0), {n: g.sum(0) for n, g in gradients.items()})
    noisy = mechanism(net, 2.0)
    released = noisy.finish(1.0)
    for name, std in noisy.stds().items():
        if released[name].numel() >= 100:
            assert float(released[name].std()) == pytest.approx(std, rel=0.3)
