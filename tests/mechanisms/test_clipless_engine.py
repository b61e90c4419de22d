"""Clipless through the engine: projection, accounting, adaptive clipping, layers of one's own, refusals."""

from __future__ import annotations

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine, RowMap
from erlangen.accounting import Accountant, composed, epsilon, gaussian, poisson
from erlangen.gradients.tape import Tape
from erlangen.lipschitz import AdaptiveBackwardClip, LipschitzLayer, SensitivityError, check_layer
from tests.mechanisms.lipschitz_runs import LOSS, assert_close, batch, mechanism, network


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


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"backstop": True}], ids=["autograd", "pieces", "backstop"])
@pytest.mark.parametrize("when", ["before", "after", "between", "never"])
def test_weights_written_through_data_release_noise_alone(when, options):
    """PyTorch counts no version for them. ``between``: they are put back before the backward pass."""
    net = network()
    _, model, optimizer, loader = private(net, sigma=0.0, mechanism_options=options)
    released = []
    optimizer.register_step_post_hook(lambda o, *_: released.append(max(float(p.grad.abs().max()) for p in model.parameters())))

    def scale(by):
        for p in model.parameters():
            p.data.mul_(by)

    for k, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if k == 1 and when in ("before", "between"):
            scale(8.0)
        loss = LOSS(model(x), y)
        if k == 1 and when in ("after", "between"):
            scale(8.0 if when == "after" else 0.125)
        loss.backward()
        optimizer.step()
    assert [r > 0 for r in released] == [True, when == "never", True, True, True]
    assert all(float(m.certified_norm()) <= m.lipschitz * 1.0001 for m in net.modules() if hasattr(m, "certified_norm"))


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


def test_an_adaptive_threshold_stays_where_float32_can_follow():
    """Where all cotangents vanish the threshold falls at every step, and with it the noise: below float32 there would be none."""
    clip = AdaptiveBackwardClip(1.0)
    for everybody, end in ((1e9, 1e-12), (-1e9, 1e12)):
        for _ in range(5000):
            clip.update(everybody, 1.0)
        assert clip.bound == end


def test_what_cannot_be_bounded_is_refused():
    data = TensorDataset(*batch(40))
    with pytest.raises(TypeError, match="needs a Lipschitz network"):
        private(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), data)
    with pytest.raises(ValueError, match="Lipschitz constant"):
        private(network(), data, loss=None)
    with pytest.raises(ValueError, match="no declared Lipschitz constant"):
        private(network(), data, loss=nn.MSELoss())
    with pytest.raises(ValueError, match="has no option"):
        private(network(), data, mechanism_options={"clip": 1.0})
    with pytest.raises(ValueError, match=r"loss 'hinge' has no option .* Did you mean 'margin'"):
        mechanism(network(), loss={"name": "hinge", "margn": 0.1})
    with pytest.raises(ValueError, match=r"loss is 'hing'; .* Did you mean 'hinge'"):
        mechanism(network(), loss="hing")
    with pytest.raises(ValueError, match="split"):
        mechanism(network(), split="fair")
    with pytest.raises(TypeError, match="float32"):
        mechanism(network().bfloat16())


def test_the_defaults_of_training_suit_lipschitz_networks():
    from erlangen.training.config import TrainConfig
    from erlangen.training.run import train

    summary = train(TrainConfig(mechanism="clipless", epsilon=3.0, seed=0, evaluations=1)).summary
    assert summary["test"]["test_accuracy"] >= 0.88
    assert summary["guarantee"]["epsilon"]["pld"] <= 3.0


class Keeping(LipschitzLayer):
    """A user's layer that changes nothing and keeps what it was given."""

    def forward(self, x):
        self.caught = x
        return x


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"backstop": True}], ids=["autograd", "pieces", "backstop"])
def test_a_loss_on_features_inside_the_network_is_refused(options):
    """It went around the gate that cuts each record's cotangent: with a weight of 100 one record moved the sum by
    1.07 sensitivities, and by more in proportion."""
    keeping = Keeping()
    net = network(keeping)
    x, y = batch(8)
    model, optimizer, loader = PrivacyEngine(seed=0).make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), 1.0), noise_multiplier=0.0, mechanism="clipless", criterion=LOSS,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8), mechanism_options=options,
    )  # fmt: skip
    rows, labels = next(iter(loader))
    loss = LOSS(model(rows), labels)
    with pytest.raises(RuntimeError, match="by another way than the logits"):
        (loss + 1e4 * keeping.caught.square().sum()).backward()
    rows, labels = next(iter(loader))
    LOSS(model(rows), labels).backward()
    optimizer.step()
    assert torch.cat([p.grad.flatten() for p in net.parameters()]).norm() <= mechanism(net).sensitivity
