"""Clipless trusts no forward that its bounds were not written for, and nothing that moves behind its back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

from erlangen import PrivacyEngine
from erlangen.lipschitz import (
    AdaptiveBackwardClip,
    BoundedInput,
    CrossEntropy,
    LipschitzLayer,
    MaxMin,
    Residual,
    Sequential,
    SpectralDense,
    backpropagate_bounds,
    check_sensitivity,
    watch,
)
from erlangen.mechanisms import Clipless

OPTIONS = [{}, {"precision": "bf16"}, {"backstop": True}]
MODES = ["autograd", "pieces", "backstop"]


def scaled(module, inputs, out):
    return 20.0 * out


class Tempered(Sequential):
    """Logits in a range that softmax likes, for which nobody computed a bound."""

    def forward(self, x):
        return 20.0 * super().forward(x)


class Halved(Sequential):
    """A forward of its own, with bounds of its own."""

    def forward(self, x):
        return 0.5 * super().forward(x)

    def propagate_input(self, x):
        whole = super().propagate_input(x)
        return whole.to(whole.shape, 0.5 * whole.norm)

    def backpropagate_cotangent(self, x, g):
        return super().backpropagate_cotangent(x, 0.5 * g)

    def parameter_bound(self, x, g):
        return super().parameter_bound(x, 0.5 * g)


class Called(SpectralDense):
    def __call__(self, x):
        return 20.0 * super().__call__(x)


class Doubled(Residual):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Louder:
    """A mixin in front of a layer overrides its forward too."""

    def forward(self, x):
        return 20.0 * super().forward(x)


class LouderMaxMin(Louder, MaxMin):
    pass


class Counting(LipschitzLayer):
    """A user's layer whose bounds do not depend on what it counts, and do on its limit."""

    limit = 1.0

    def __init__(self):
        super().__init__()
        self.calls = 0

    def jacobian_bound(self, x):
        return self.limit

    def forward(self, x):
        self.calls += 1
        return self.limit * x


def network(kind=Sequential, *extra):
    torch.manual_seed(0)
    return kind(BoundedInput((8,), 1.0), SpectralDense(8, 16), MaxMin(), SpectralDense(16, 4), *extra)


def worst(net, change=None, steps=30, **options):
    """The largest contribution of one record over what ε assumes, in training with batches of about one record.

    ``change`` is made to the network after the first step.
    """
    torch.manual_seed(1)
    data = TensorDataset(10 * torch.randn(64, 8), torch.randint(0, 4, (64,)))
    engine, loss = PrivacyEngine(seed=0), CrossEntropy()
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=5.0), data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=1e-3, mechanism="clipless", criterion=loss, mechanism_options=options,
    )  # fmt: skip
    mechanism = engine.training.mechanism
    plain, found, rows = mechanism.finish, [], 1

    def finish(expected):
        noise = mechanism._noise
        found.append(float((mechanism._total() / noise).norm()) * mechanism.noise_multiplier / max(rows, 1))
        return plain(expected)

    mechanism.finish = finish
    for step, (x, y) in enumerate(loader):
        rows = len(x)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if step == 0 and change is not None:
            change(net)
        if step == steps:
            break
    engine.remove()
    return max(found)


def limits(net):
    net[1].lipschitz = net[3].lipschitz = 10.0


def radius(net):
    net[0].bound = 50.0


def hook(net):
    net[3].register_forward_hook(scaled)


def pre_hook(net):
    net[3].register_forward_pre_hook(lambda module, inputs: 20.0 * inputs[0])


def backward_hook(net):
    net[2].register_full_backward_hook(lambda module, given, received: tuple(20.0 * g for g in given))


def backward_pre_hook(net):
    net[2].register_full_backward_pre_hook(lambda module, received: tuple(20.0 * g for g in received))


def shadow(net):
    net[2].forward = lambda x: 20.0 * x


def longer(net):
    """Frozen, or the engine would refuse it before: nothing clips what it learns."""
    net.append(Residual(SpectralDense(4, 4), average=False).requires_grad_(False))


def exchanged(net):
    net._modules["1"] = SpectralDense(8, 16, lipschitz=20.0).requires_grad_(False)


CHANGES = {
    limits: "lipschitz", radius: "bound .*50.* of layer '0'", hook: "hook .* '3'", pre_hook: "hook", backward_hook: "hook .* '2'",
    backward_pre_hook: "hook", shadow: "replaced on the instance", longer: "added, removed", exchanged: "exchanged",
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=MODES)
def test_what_is_promised_is_kept(options):
    assert 0.1 < worst(network(), **options) <= 1.0
    assert worst(network(Halved), **options) <= 1.0


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=MODES)
def test_a_change_after_bounds_were_taken_is_refused(change, options):
    with pytest.raises(RuntimeError, match=CHANGES[change]):
        worst(network(), change, **options)


@pytest.mark.parametrize("change", [longer, exchanged], ids=lambda change: change.__name__)
def test_layers_that_train_are_refused_before_that(change):
    with pytest.raises(RuntimeError, match="was put into the module"):
        worst(network(), lambda net: (change(net), net.requires_grad_(True)))


@pytest.mark.parametrize("change", [limits, radius, hook, pre_hook, backward_hook, shadow], ids=lambda change: change.__name__)
def test_changes_that_nobody_looks_for_break_the_promise(change, monkeypatch):
    """The broken twin of the test above: one record contributes up to 35 times what ε assumes."""
    monkeypatch.setattr(Clipless, "_require_as_bounded", lambda self: None)
    assert worst(network(), change) > 4.0


@pytest.mark.parametrize("change", [hook, pre_hook, backward_hook, backward_pre_hook, shadow], ids=lambda change: change.__name__)
def test_what_has_no_bound_is_refused_from_the_start(change):
    net = network()
    change(net)
    with pytest.raises(ValueError, match=r"hook|replaced on the instance"):
        worst(net)


def test_a_forward_of_ones_own_needs_bounds_of_its_own(monkeypatch):
    for net in (
        network(Tempered), network(Sequential, Doubled(SpectralDense(4, 4))), network(Sequential, Called(4, 4)),
        network(Sequential, LouderMaxMin(-1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"inherits the bounds of another: write propagate_input, backpropagate_cotangent"):
            worst(net)
        with pytest.raises(ValueError, match="inherits the bounds"):
            backpropagate_bounds(net, 1.0)
    monkeypatch.setattr(watch, "_unsaid", lambda layer: [])
    assert worst(network(Tempered)) > 10.0


def test_a_hook_on_all_modules_is_refused():
    handle = register_module_forward_hook(lambda module, inputs, out: None)
    try:
        with pytest.raises(ValueError, match="every module"):
            backpropagate_bounds(network(), 1.0)
    finally:
        handle.remove()


def test_hooks_around_the_whole_network_stay():
    """What goes in is projected behind them, what comes back is cut before them."""
    net = network()
    net.register_forward_hook(scaled)
    net.register_forward_pre_hook(lambda module, inputs: 20.0 * inputs[0])
    assert worst(net) <= 1.0


def test_attributes_that_no_bound_is_computed_from_may_move():
    counting = Counting()
    net = network(Sequential, counting)
    assert worst(net, lambda net: setattr(net[0], "scale", 2.0)) <= 1.0
    assert counting.calls > 20
    with pytest.raises(RuntimeError, match="attributes of layer '4'"):  # hides the limit of its class
        worst(network(Sequential, Counting()), lambda net: setattr(net[4], "limit", 20.0))


def test_the_noise_of_counts_is_followed():
    clip = AdaptiveBackwardClip(0.5, count_std=2.0)
    built = Clipless(1.0, network(Sequential, clip), CrossEntropy())
    built.bind(dict(built.network.named_parameters()))
    clip.count_std = 0.6
    gradient = sum((built.bounds[n] / built.noise_std(n)) ** 2 for n in built.bounds)
    assert (gradient + (0.5 / 0.6) ** 2) ** -0.5 == pytest.approx(1.0)


def test_copies_of_a_network_in_training_are_taken():
    net = network()
    engine, loss = PrivacyEngine(seed=0), CrossEntropy()
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0, mechanism="clipless", criterion=loss, mechanism_options={"backstop": True},
    )  # fmt: skip
    assert check_sensitivity(copy.deepcopy(net), loss, steps=2, restarts=1).worst <= 1.0
